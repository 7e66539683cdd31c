"""`guidellm`: load of synthetic chats, completions and responses, with the model's tokenizer from a local folder."""

from __future__ import annotations

import json
from pathlib import Path

from harness import Session, install_from_pypi

PACKAGES = ("guidellm==0.8.1",)
SERVER = "real"
NUM_REQUESTS = 8


def install(home: Path, constraints: Path | None) -> None:
    install_from_pypi(home, *PACKAGES, constraints=constraints)


def use(session: Session) -> None:
    for path in ("/v1/chat/completions", "/v1/completions", "/v1/responses"):
        out = session.work / f"{path.replace('/', '-')[1:]}.json"
        command = ["guidellm", "run", "--disable-console"]
        command += ["--backend", f"kind=openai_http,target={session.url},model={session.model},request_format={path}"]
        command += ["--tokenizer", f"kind=huggingface_auto,model={session.tokenizer}"]
        command += ["--data", "kind=synthetic_text,prompt_tokens=64,output_tokens=16"]
        command += ["--profile", "kind=concurrent,streams=2"]
        command += ["--constraint", f"kind=max_requests,count={NUM_REQUESTS}"]
        command += ["--output", f"kind=json,path={out}"]
        ran = session.run(*command)
        if not out.is_file():
            session.check(f"load on {path}", command, False, ran.last_line)
            continue
        (benchmark,) = json.loads(out.read_text())["benchmarks"]
        totals = benchmark["metrics"]["request_totals"]
        tokens = benchmark["metrics"]["output_token_count"]["successful"]["mean"]
        passed = totals["successful"] == NUM_REQUESTS and totals["errored"] == 0 and tokens == 16
        saw = f"{totals['successful']} of {NUM_REQUESTS} succeeded, {totals['errored']} failed, {tokens:g} tokens each"
        session.check(f"load on {path}", command, passed, saw)
