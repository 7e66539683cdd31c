"""`inspect-ai`: a task whose solver calls tools, over chat completions and over responses.

The engine is scripted: it calls the tool with the numbers of the question, and answers with what the tool gave.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from harness import Session, install_from_pypi

PACKAGES = ("inspect-ai==0.3.285", "openai==3.54.0")
SERVER = "scripted"

TASK = '''
from inspect_ai import Task, task
from inspect_ai.dataset import Sample
from inspect_ai.scorer import includes
from inspect_ai.solver import generate, use_tools
from inspect_ai.tool import tool


@tool
def add():
    async def execute(x: int, y: int) -> int:
        """Add two numbers.

        Args:
            x: First number to add.
            y: Second number to add.
        """
        return x + y

    return execute


@task
def sums():
    samples = [Sample(input=f"What is {a} + {b}?", target=str(a + b)) for a, b in [(2, 3), (40, 2), (17, 25)]]
    return Task(dataset=samples, solver=[use_tools(add()), generate()], scorer=includes())
'''


def install(home: Path, constraints: Path | None) -> None:
    install_from_pypi(home, *PACKAGES, constraints=constraints)


def reply_to(request: Any) -> Any:
    """What the model writes."""
    from aengine.testing import Reply

    last = request.messages[-1]
    if last["role"] == "tool":
        return f"It is {request.text}."
    numbers = [int(digits) for digits in re.findall(r"\d+", request.text)]
    if not request.tools:  # inspect tries whether there are responses
        return "ok"
    return Reply("I add.", tool_calls=[("add", {"x": numbers[0], "y": numbers[1]})])


def use(session: Session) -> None:
    (session.work / "sums.py").write_text(TASK)
    openai = ["--model", f"openai/{session.model}", "--model-base-url", f"{session.url}/v1"]
    compatible = {"LOCAL_API_KEY": "none", "LOCAL_BASE_URL": f"{session.url}/v1"}
    for what, options in [
        ("a task with tools, by chat completions", [*openai, "-M", "responses_api=false"]),
        ("the same by responses", [*openai, "-M", "responses_api=true"]),
        ("the same, the server as OpenAI-compatible", ["--model", f"openai-api/local/{session.model}"]),
        (
            "with options",
            [*openai, "-M", "responses_api=false", "--seed", "1", "--temperature", "0.5", "--top-p", "0.9"],
        ),
        ("with log-probabilities", [*openai, "-M", "responses_api=false", "--logprobs", "--top-logprobs", "2"]),
    ]:
        logs = session.work / f"logs{len(session.checks)}"
        command = ["inspect", "eval", "sums.py", *options, "--log-format", "json", "--log-dir", logs.name]
        command += ["--display", "plain", "--max-retries", "0"]
        ran = session.run(*command, env=compatible)
        files = list(logs.glob("*.json"))
        log = json.loads(files[0].read_text()) if files else {}
        results = log.get("results") or {}
        accuracy = [m["value"] for s in results.get("scores", ()) for n, m in s["metrics"].items() if n == "accuracy"]
        error = (log.get("error") or {}).get("message", "")
        session.check(what, command, accuracy == [1], f"accuracy {accuracy[0]}" if accuracy else error or ran.last_line)
