"""The AI SDK and OpenAI's own package for node: tools, schemas and streams, by responses and by chats.

The engine is scripted: it reasons, calls the tool with the numbers asked for, and answers with what it gave.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

from harness import Session, install_from_npm, node_package

PACKAGES = (
    *("ai@7.0.173", "@ai-sdk/openai@4.0.118", "@ai-sdk/openai-compatible@3.0.92", "openai@7.57.0", "zod@4.6.7"),
    node_package(),
)
SERVER = "scripted"
ENGINE = {"reasoning": True}
PROGRAM = Path(__file__).with_name("ai_sdk.mjs")
NUM_REPORTS = 15


def install(home: Path, constraints: Path | None) -> None:
    install_from_npm(home, *PACKAGES)


def reply_to(request: Any) -> Any:
    """What the model writes."""
    from aengine.testing import Reply

    if request.messages[-1]["role"] == "tool":
        return Reply(f"It is {request.text}.", reasoning="I have it.")
    if request.text == "wait":
        return "more " * 8000
    if request.tools:
        x, y = map(int, re.findall(r"\d+", request.text))
        return Reply("I add. ", reasoning="There are numbers.", tool_calls=[("add", {"x": x, "y": y})])
    if request.params.structured_output is not None:
        return Reply(value={"city": "Paris"})
    return Reply("Paris", reasoning="I know it.")


def use(session: Session) -> None:
    program = session.home / PROGRAM.name  # beside node_modules, where node looks for packages
    shutil.copy(PROGRAM, program)
    command = ["node", PROGRAM.name, session.url, session.model]
    ran = session.run(session.node, program, session.url, session.model)
    reports = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    for report in reports:
        passed = str(report["saw"]).endswith(("It is 5.", "Paris", "left"))
        session.check(report["what"], command, passed, report["saw"])
    passed = len(reports) == NUM_REPORTS and session.wait_until_idle()
    session.check("all was done, and the stream that was left has ended", command, passed, ran.last_line)
