"""`llm` with tools, its own and a Python function, over chats and over responses: calls, results, the last answer.

The engine is scripted, since no model of this size calls a tool when it should.
"""

from __future__ import annotations

from typing import Any

from client_llm import MODELS, PACKAGES, install
from harness import Session

__all__ = ["PACKAGES", "SERVER", "install", "reply_to", "use"]

SERVER = "scripted"
FUNCTION = 'def multiply(x: int, y: int) -> int:\n    "Multiply two numbers."\n    return x * y\n'


def reply_to(request: Any) -> Any:
    """What the model writes."""
    from aengine.testing import Reply

    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    if results:
        return f"It is {' and '.join(results)}."
    names = [tool.name for tool in request.tools]
    if "multiply" in names:
        return Reply("I multiply.", tool_calls=[("multiply", {"x": 6, "y": 7}), ("multiply", {"x": 10, "y": 10})])
    return Reply(tool_calls=[(names[0], {})])


def use(session: Session) -> None:
    folder = session.work / "llm"
    folder.mkdir()
    models = MODELS.replace("supports_schema: true", "supports_schema: true\n  supports_tools: true", 2)
    (folder / "extra-openai-models.yaml").write_text(models.format(url=session.url, model=session.model))
    (session.work / "functions.py").write_text(FUNCTION)
    env = {"LLM_USER_PATH": str(folder)}
    for model, more in [
        ("smol", []),
        ("smol", ["--no-stream"]),
        ("smol-responses", []),
        ("smol-responses", ["--no-stream"]),
    ]:
        command = ["llm", "-m", model, "--functions", "functions.py", *more, "What are 6 * 7 and 10 * 10?"]
        ran = session.run(*command, env=env)
        what = f"two calls of a function at once, {model}{', whole' if more else ', streamed'}"
        session.check(what, command, "It is 42 and 100." in ran.stdout, ran.last_line)

    command = ["llm", "-m", "smol", "-T", "llm_version", "--td", "Which version is this?"]
    ran = session.run(*command, env=env)
    version = PACKAGES[0].partition("==")[2]
    session.check("a tool of llm's own", command, f"It is {version}." in ran.stdout, ran.last_line)
