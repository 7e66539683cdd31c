"""Codex, OpenAI's command line agent, which speaks only ``/v1/responses``: whole turns with tools.

The engine is scripted, since no model of this size can do it: it says something and asks for a command, reads what the
command printed, writes a file by another one, and ends with a sentence about what it has read.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import Session, install_from_npm

PACKAGES = ("@openai/codex@0.169.0",)
SERVER = "scripted"
ENGINE = {"reasoning": True}

SETTINGS = """
model = "{model}"
model_provider = "aengine"
approval_policy = "never"
sandbox_mode = "danger-full-access"
check_for_update_on_startup = false
[analytics]
enabled = false
[model_providers.aengine]
name = "aengine"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "OPENAI_API_KEY"
"""

SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}


def install(home: Path, constraints: Path | None) -> None:
    install_from_npm(home, *PACKAGES)


def reply_to(request: Any) -> Any:
    """What the model writes."""
    from aengine.testing import Reply

    results = [message["content"] for message in request.messages if message["role"] == "tool"]
    question = next(m for m in reversed(request.messages) if m["role"] == "user")["content"]
    question = question if isinstance(question, str) else question[-1]["text"]
    if "city" in question:
        return Reply(value={"city": "Paris"})
    if "wait" in question:
        return Reply("I count. " + "one more " * 4000)
    since = request.messages[::-1].index(next(m for m in reversed(request.messages) if m["role"] == "user"))
    step = sum(message["role"] == "tool" for message in request.messages[len(request.messages) - since :])
    if step == 0:
        calls = [("exec_command", {"cmd": "cat notes.txt"}), ("exec_command", {"cmd": "ls"})]
        return Reply("I read the notes.", reasoning="They are in a file.", tool_calls=calls)
    if step == 2:
        return Reply(tool_calls=[("exec_command", {"cmd": "echo 42 > answer.txt"})])
    return f"The notes say: {'blue' if any('blue' in str(one) for one in results) else 'nothing'}."


def use(session: Session) -> None:
    codex = session.work / "codex"
    codex.mkdir()
    (codex / "config.toml").write_text(SETTINGS.format(url=session.url, model=session.model))
    env = {"CODEX_HOME": str(codex)}
    folder = session.work / "project"
    folder.mkdir()
    (folder / "notes.txt").write_text("The sky is blue.\n")

    command = ["codex", "exec", "--json", "--skip-git-repo-check", "Read the notes and write the answer."]
    ran = session.run(*command, env=env, cwd=folder)
    events = [json.loads(line) for line in ran.stdout.splitlines() if line.startswith("{")]
    items = [event["item"] for event in events if event["type"] == "item.completed"]
    commands = [item for item in items if item["type"] == "command_execution"]
    texts = [item["text"] for item in items if item["type"] == "agent_message"]
    has_written = (folder / "answer.txt").is_file() and (folder / "answer.txt").read_text() == "42\n"
    passed = (
        ran.code == 0
        and has_written
        and any("blue" in item["aggregated_output"] for item in commands)
        and texts == ["I read the notes.", "The notes say: blue."]
    )
    saw = f"{len(commands)} commands were run; it said {texts}"
    session.check("a turn: two commands at once, one that writes a file, a last message", command, passed, saw)

    command = ["codex", "exec", "resume", "--last", "--json", "--skip-git-repo-check", "Again, please."]
    ran = session.run(*command, env=env, cwd=folder)
    session.check("a second turn of the same session", command, "The notes say: blue." in ran.stdout, ran.last_line)

    schema = session.work / "schema.json"
    schema.write_text(json.dumps(SCHEMA))
    last = session.work / "last.json"
    command = ["codex", "exec", "--skip-git-repo-check", "--output-schema", schema, "-o", last, "Which city?"]
    ran = session.run(*command, env=env, cwd=folder)
    saw = last.read_text() if last.is_file() else ran.last_line
    session.check("a last message with a schema", command, saw == '{"city": "Paris"}', saw)

    command = ["codex", "exec", "--json", "--skip-git-repo-check", "wait"]
    ran = session.run(*command, env=env, cwd=folder, interrupt_after=6.0)
    is_idle = session.wait_until_idle()
    passed = is_idle and "turn.completed" not in ran.stdout
    session.check("Ctrl-C in mid-answer ends the request", command, passed, f"idle afterwards: {is_idle}")
