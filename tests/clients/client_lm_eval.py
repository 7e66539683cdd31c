"""`lm-eval`: over local files generation, as chats and as completions; choices and perplexity by log-likelihoods."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from harness import Ran, Session, install_from_pypi

PACKAGES = ("lm-eval[api]==0.4.13", "transformers==5.24.0")
SERVER = "real"

CAPITALS = {"France": "Paris", "Italy": "Rome", "Japan": "Tokyo", "Egypt": "Cairo", "Spain": "Madrid", "Cuba": "Havana"}
GENERATION = """
task: capitals
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: generate_until
doc_to_text: "What is the capital of {{{{country}}}}? Answer with its name only.\\nAnswer:"
doc_to_target: "{{{{capital}}}}"
generation_kwargs: {{until: ["\\n\\n", "Question:"], max_gen_toks: 24, temperature: 0.0, do_sample: false}}
filter_list:
  - name: name
    filter: [{{function: regex, regex_pattern: "(Paris|Rome|Tokyo|Cairo|Madrid|Havana)"}}, {{function: take_first}}]
metric_list: [{{metric: exact_match, aggregation: mean, higher_is_better: true}}]
"""
CHOICE = """
task: capitals_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "The capital of {{{{country}}}} is"
doc_to_choice: ["Paris", "Rome", "Tokyo", "Cairo", "Madrid", "Havana"]
doc_to_target: capital
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
PERPLEXITY = """
task: sentences
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "The capital of {{{{country}}}} is {{{{capital}}}}, a city of many old streets."
metric_list: [{{metric: bits_per_byte}}]
"""


def install(home: Path, constraints: Path | None) -> None:
    install_from_pypi(home, *PACKAGES, constraints=constraints)


def use(session: Session) -> None:
    tasks = session.work / "tasks"
    tasks.mkdir()
    file = tasks / "capitals.jsonl"
    file.write_text("".join(json.dumps({"country": c, "capital": k}) + "\n" for c, k in CAPITALS.items()))
    (tasks / "capitals.yaml").write_text(GENERATION.format(file=file))
    (tasks / "choice.yaml").write_text(CHOICE.format(file=file))
    (tasks / "sentences.yaml").write_text(PERPLEXITY.format(file=file))

    chat = ["local-chat-completions", f"base_url={session.url}/v1/chat/completions", "capitals"]
    text = ["local-completions", f"base_url={session.url}/v1/completions", "capitals"]
    choice, sentences = (*text[:2], "capitals_choice"), (*text[:2], "sentences")
    ids = f"tokenizer_backend=huggingface,tokenizer={session.tokenizer}"
    as_chats = ["--apply_chat_template"]
    match = "exact_match,name", 0.01, 1.0
    for what, (model, url, task), more, options, (metric, least, most) in [
        ("chats, four at once", chat, "num_concurrent=4", as_chats, match),
        ("completions of token ids", text, ids, [], match),
        ("completions of texts", text, "tokenizer_backend=none,tokenized_requests=False", [], match),
        ("completions, and nothing said of a tokenizer", text, "", [], match),
        ("log-likelihoods of choices", choice, f"{ids},num_concurrent=4", [], ("acc,none", 0.5, 1.0)),
        ("perplexity", sentences, f"{ids},num_concurrent=4", [], ("bits_per_byte,none", 0.5, 2.5)),
    ]:
        ran, command = _run(session, model, url, more, task, options)
        found = _result(session, task)
        passed = ran.code == 0 and found is not None and least <= found[metric] <= most
        session.check(what, command, passed, f"{metric} {found[metric]:.2f}" if found else _error_in(ran))


def _run(
    session: Session, model: str, url: str, more: str, task: str, options: list[str]
) -> tuple[Ran, list[str | Path]]:
    arguments = f"model={session.model},{url}" + (f",{more}" if more else "")
    command = ["lm-eval", "run", "--model", model, "--model_args", arguments, "--tasks", task]
    command += ["--include_path", "tasks", "--output_path", "out", *options]
    for old in (session.work / "out").rglob("*.json"):
        old.unlink()
    return session.run(*command), list(command)


def _result(session: Session, task: str) -> dict[str, Any] | None:
    files = list((session.work / "out").rglob("results_*.json"))
    return json.loads(files[0].read_text())["results"][task] if files else None


def _error_in(ran: Ran) -> str:
    """The server's words if there are any, else the last line."""
    lines = [line.strip() for line in (ran.stdout + ran.stderr).splitlines()]
    told = [line[line.index('"message"') :] for line in lines if '"message"' in line]
    return (told or [line for line in lines if line] or [""])[-1][:200]
