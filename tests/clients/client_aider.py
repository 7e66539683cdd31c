"""`aider`: edits of a file in a git repository, committed. The engine is scripted: it writes edits as aider asks."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

from harness import Session, install_from_pypi

PACKAGES = ("aider-chat==0.86.2",)
SERVER = "scripted"

DIFF = """I rename the function.

hello.py
```python
<<<<<<< SEARCH
def hello():
=======
def greet():
>>>>>>> REPLACE
```
"""
WHOLE = """hello.py
```
def salute():
    print("hello")
```
"""


def install(home: Path, constraints: Path | None) -> None:
    install_from_pypi(home, *PACKAGES, constraints=constraints)


def reply_to(request: Any) -> Any:
    """What the model writes."""
    if "commit message" in str(request.messages[0]["content"]).lower():
        return "feat: rename the function"
    return WHOLE if "salute" in str(request.messages) else DIFF


def use(session: Session) -> None:
    repository = session.work / "repository"
    repository.mkdir()
    (repository / "hello.py").write_text('def hello():\n    print("hello")\n')
    env = {"GIT_CONFIG_GLOBAL": "/dev/null", "GIT_AUTHOR_NAME": "a", "GIT_AUTHOR_EMAIL": "a@example.org"}
    env |= {"GIT_COMMITTER_NAME": "a", "GIT_COMMITTER_EMAIL": "a@example.org"}
    for words in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "begin"]):
        subprocess.run(["git", *words], cwd=repository, check=True, env=session.environment | env)

    for what, form, question, wanted in [
        ("an edit as a diff, streamed, and its commit", "diff", "Rename hello to greet.", "def greet():"),
        ("an edit as a whole file, not streamed", "whole", "Rename it to salute.", "def salute():"),
    ]:
        command = ["aider", "--model", f"openai/{session.model}", "--openai-api-base", f"{session.url}/v1"]
        command += ["--edit-format", form, "--yes-always", "--no-show-model-warnings", "--analytics-disable"]
        command += ["--no-check-update", "--no-show-release-notes", "--no-detect-urls", "--no-pretty"]
        command += ["--stream" if form == "diff" else "--no-stream", "--message", question, "hello.py"]
        ran = session.run(*command, cwd=repository, env=env)
        log = subprocess.run(
            ["git", "log", "-1", "--format=%s"], cwd=repository, capture_output=True, text=True, env=session.environment
        ).stdout.strip()
        has_edit = wanted in (repository / "hello.py").read_text()
        saw = f"commit {log!r}" if has_edit else ran.last_line
        session.check(what, command, ran.code == 0 and has_edit and log.startswith("feat:"), saw)
