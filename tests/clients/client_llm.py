"""`llm`, Simon Willison's command line: chats, completions, responses, conversations, schemas, Ctrl-C."""

from __future__ import annotations

import json
from pathlib import Path

from harness import Session, install_from_pypi

PACKAGES = ("llm==0.36",)
SERVER = "real"
NUM_SCHEMA_ANSWERS = 24

MODELS = """
- model_id: smol
  model_name: {model}
  api_base: "{url}/v1"
  supports_schema: true
- model_id: smol-responses
  model_name: {model}
  api_base: "{url}/v1"
  responses: true
  supports_schema: true
- model_id: smol-text
  model_name: {model}
  api_base: "{url}/v1"
  completion: true
"""


def install(home: Path, constraints: Path | None) -> None:
    install_from_pypi(home, *PACKAGES, constraints=constraints)


def use(session: Session) -> None:
    folder = session.work / "llm"
    folder.mkdir()
    (folder / "extra-openai-models.yaml").write_text(MODELS.format(url=session.url, model=session.model))
    env = {"LLM_USER_PATH": str(folder)}
    few = ["-o", "max_tokens", "60"]

    command = ["llm", "models", "list"]
    ran = session.run(*command, env=env)
    session.check("models of extra-openai-models.yaml", command, ran.stdout.count("smol") == 3, "smol, smol-text, ...")
    for what, options in [
        ("a chat, streamed", ["-m", "smol", "-o", "temperature", "0"]),
        ("a chat, whole, with a seed", ["-m", "smol", "--no-stream", "-o", "seed", "7", "-o", "temperature", "0"]),
        ("a chat with a system prompt", ["-m", "smol", "-s", "Answer in one word.", "-o", "temperature", "0"]),
        ("the conversation goes on", ["-c"]),
        ("a response, streamed", ["-m", "smol-responses", "-o", "temperature", "0"]),
        ("its conversation goes on", ["-c"]),
    ]:
        command = ["llm", *options, *few, "What is the capital of France?"]
        ran = session.run(*command, env=env)
        session.check(what, command, ran.code == 0 and bool(ran.stdout.strip()), ran.last_line)

    command = ["llm", "-m", "smol-text", "-o", "max_tokens", "8", "-o", "temperature", "0", "The capital of France is"]
    ran = session.run(*command, env=env)
    session.check("a completion", command, "Paris" in ran.stdout, repr(ran.stdout))

    _check_schemas(session, env)

    command = ["llm", "-m", "smol", "-o", "max_tokens", "4000", "-o", "temperature", "1", "Tell a very long story."]
    ran = session.run(*command, env=env, interrupt_after=6.0)
    is_idle = session.wait_until_idle()
    passed = is_idle and ran.code != 0 and bool(ran.stdout)
    session.check("Ctrl-C in mid-answer ends the request", command, passed, f"idle afterwards: {is_idle}")


def _check_schemas(session: Session, env: dict[str, str]) -> None:
    """Answers that a schema shapes have the keys that were asked for, and no others."""
    few = ["-o", "max_tokens", "250", "-o", "temperature", "0.7"]
    keys = []
    command = ["llm", "-m", "smol", *few, "--schema", "name, age int", "Invent a dog"]
    for i in range(NUM_SCHEMA_ANSWERS):
        ran = session.run(*command, "-o", "seed", str(i), env=env)
        keys.append(_keys_of(ran.stdout))
    right = keys.count("age, name")
    saw = (
        f"{right} of {len(keys)} have just name and age; others: {sorted({key for key in keys if key != 'age, name'})}"
    )
    session.check(f"a schema, {len(keys)} times", command, right == len(keys), saw)

    command = ["llm", "-m", "smol", *few, "--schema-multi", "name, age int", "Invent two dogs"]
    ran = session.run(*command, env=env)
    session.check("a schema of a list", command, _keys_of(ran.stdout) in ("items", "cut off"), ran.last_line)


def _keys_of(text: str) -> str:
    try:
        answer = json.loads(text)
    except ValueError:
        return "cut off" if text.strip().startswith("{") else f"no JSON: {text[:60]!r}"
    return ", ".join(sorted(answer)) if isinstance(answer, dict) else f"no object: {text[:60]!r}"
