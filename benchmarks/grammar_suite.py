"""How right a grammar backend is: the instances of a JSON schema test suite, token by token.

    python benchmarks/grammar_suite.py json-schema-test-suite.jsonl [--backend NAME] [--relax] [--optional]
    python benchmarks/grammar_suite.py maskbench/data [--sample 1500] [--time-limit 10]

A suite is a file of one group a line (``name``, ``schema``, ``tests`` with ``valid`` and ``data``), as made of the
JSON-Schema-Test-Suite, or a directory of one group a file, as MaskBench (guidance-ai/jsonschemabench, maskbench/data).

A schema goes the way of a request's: checked by `spec_of`, compiled by the backend. Of those that compile, each
instance is written as ``json.dumps`` writes it, tokenised with SmolLM2's tokenizer and given to a matcher, with a mask
before each token; it is accepted when the end may follow. Printed as JSON: how many valid and invalid instances were
accepted and rejected, how often a mask and ``accept`` disagreed, and how long compiles and masks took. Where a text is
forced, a mask allows only the token that the tokenizer would write, and ``accept`` other ways to write it: counted
apart, when `Matcher.forced_tokens` bears it out.

A valid instance may be rejected rightly: a grammar fixes the order of properties. It is counted apart when it passes
with its properties in the schema's order.
"""

from __future__ import annotations

import argparse
import json
import sys
import threading
import time
from array import array
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.structured.backend import Backend, Compiled, Matcher, MatcherError
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.schema_walk import pointed_at
from aengine.engine.structured.spec import spec_of
from aengine.engine.structured.vocabulary import Vocabulary
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.errors import GrammarError
from aengine.params import StructuredOutput

NAMED = (
    "compiles slower than 2 s",
    "compiles ended by the time limit",
    "refused as unsatisfiable, though it has valid instances",
    "invalid accepted, and no warning",
)
SLOW_SECONDS = 2.0
"""The engine's limit for a compile."""
MAX_NAMES = 20
PROGRESS_SECONDS = 5.0


class Group(NamedTuple):
    name: str
    schema: Any
    tests: list[dict[str, Any]]


class Suite:
    """Counts what happens to each group."""

    def __init__(
        self, backend: Backend, tokenizer: Tokenizer, words: Vocabulary, *, relax: bool, time_limit: float
    ) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.names: dict[str, list[str]] = {name: [] for name in NAMED}
        self.times = {"check ms": array("d"), "compile ms": array("d"), "mask fill us": array("d")}
        self._backend = backend
        self._tokenizer = tokenizer
        self._options: Any = {"backend": backend.name, "on_unsupported": "relax" if relax else "error"}
        self._time_limit = time_limit
        self._end = words.eos_ids[0]
        self._mask = np.zeros((1, words.row_bytes // 4), np.int32)

    def group(self, group: Group) -> None:
        self.counts["schemas"] += 1
        try:
            compiled = self._compile(group)
        except GrammarError as error:
            self.refused[error.kind] += 1
            self.counts["instances of refused schemas"] += len(group.tests)
            if error.kind == "unsatisfiable" and any(test["valid"] for test in group.tests):
                self.names["refused as unsatisfiable, though it has valid instances"].append(f"{group.name}: {error}")
            return
        except Exception as error:
            self.counts["crashes"] += 1
            self.wrong.append(f"crash: {group.name}: {error!r}")
            return
        self.counts["schemas compiled"] += 1
        for test in group.tests:
            self._test(compiled, group, test)

    def _compile(self, group: Group) -> Compiled:
        """Raises GrammarError."""
        began = time.perf_counter()
        spec = spec_of(StructuredOutput(json_schema=group.schema, open_objects=True, **self._options))
        checked = time.perf_counter()
        self.times["check ms"].append((checked - began) * 1e3)
        compiled = None
        try:
            compiled = self._backend.compile(spec)
            self.times["compile ms"].append((time.perf_counter() - checked) * 1e3)
            return compiled
        finally:
            seconds = time.perf_counter() - checked
            if seconds > SLOW_SECONDS:
                self.names["compiles slower than 2 s"].append(f"{group.name}: {seconds:.1f} s")
            if compiled is None and seconds >= self._time_limit:
                self.names["compiles ended by the time limit"].append(group.name)

    def _test(self, compiled: Compiled, group: Group, test: dict[str, Any]) -> None:
        valid = "valid" if test["valid"] else "invalid"
        shown = f"{group.name}: {json.dumps(test['data'])[:80]}"
        try:
            accepted = self._passes(compiled, test["data"])
            if test["valid"] and not accepted and self._passes(compiled, in_order(test["data"], group.schema)):
                self.counts["valid accepted in the schema's order"] += 1
                return
        except (KeyboardInterrupt, SystemExit):
            raise
        except BaseException as error:  # a library's panic is no Exception
            kind = f"{valid} ended by MatcherError" if isinstance(error, MatcherError) else "crashes"
            self.counts[kind] += 1
            self.wrong.append(f"{kind}: {shown}: {error!r}")
            return
        outcome = f"{valid} {'accepted' if accepted else 'rejected'}"
        self.counts[outcome] += 1
        if accepted and not test["valid"] and not compiled.warnings:
            self.names["invalid accepted, and no warning"].append(shown)
        if accepted != test["valid"]:
            self.wrong.append(f"{outcome}: {shown}")

    def _passes(self, compiled: Compiled, data: Any) -> bool:
        matcher = compiled.matcher()
        text = json.dumps(data, ensure_ascii=False)
        for token_id in [*self._tokenizer.encode(text, add_special_tokens=False), self._end]:
            began = time.perf_counter()
            matcher.fill(self._mask, 0)
            self.times["mask fill us"].append((time.perf_counter() - began) * 1e6)
            allowed = self._allows(token_id)
            forced = not allowed and self._is_forced(matcher)
            accepted = matcher.accept([token_id]) == 1
            self.counts["tokens"] += 1
            if accepted and forced:
                self.counts["accepted, but not how the tokenizer writes it"] += 1
            elif accepted != allowed:
                self.counts["mask disagreements"] += 1
                self.wrong.append(f"mask disagrees: token {token_id}, accepted {accepted}, in {text[:200]}")
            if not accepted:
                return False
        return True

    def _allows(self, token_id: int) -> bool:
        return bool(int(self._mask[0, token_id // 32]) >> token_id % 32 & 1)

    def _is_forced(self, matcher: Matcher) -> bool:
        """Whether the mask allows one token alone, and it is how the tokenizer writes a text that must come."""
        forced = matcher.forced_tokens()
        return bool(forced) and self._allows(forced[0]) and int.from_bytes(self._mask.tobytes()).bit_count() == 1


def in_order(data: Any, root: Any, schemas: list[Any] | None = None) -> Any:
    """The instance with its properties in the order of ``schemas``, parts of ``root``, as deep as that is plain."""
    parts: list[dict[str, Any]] = []
    for schema in [root] if schemas is None else schemas:
        collect_parts(schema, root, parts)
    if isinstance(data, list):
        return [in_order(item, root, [part["items"] for part in parts if "items" in part]) for item in data]
    if not isinstance(data, dict):
        return data
    named: dict[str, list[Any]] = {}
    for part in parts:
        for key, member in part.get("properties", {}).items():
            named.setdefault(key, []).append(member)
    others = [part["additionalProperties"] for part in parts if "additionalProperties" in part]
    others += [member for part in parts for member in part.get("patternProperties", {}).values()]
    keys = [key for key in named if key in data] + [key for key in data if key not in named]
    return {key: in_order(data[key], root, named.get(key, others)) for key in keys}


def collect_parts(schema: Any, root: Any, parts: list[dict[str, Any]]) -> None:
    """Add the schema, what it refers to and what it is combined of."""
    if not isinstance(schema, dict) or any(schema is part for part in parts):
        return
    ref = str(schema.get("$ref", ""))
    target = pointed_at(root, ref) if ref == "#" or ref.startswith("#/") else None
    parts.append(schema)
    for member in (target and target[1], *(m for key in ("allOf", "anyOf", "oneOf") for m in schema.get(key, ()))):
        collect_parts(member, root, parts)


class Groups:
    """The groups of a suite, or ``sample`` of them: every k-th in the order of the file, or of the files' names."""

    def __init__(self, path: Path, *, optional: bool = False, sample: int | None = None) -> None:
        found: list[Any]
        if path.is_dir():
            found = sorted(path.glob("*.json"))
        else:
            with path.open(encoding="utf-8") as file:
                lines = [json.loads(line) for line in file if line.strip()]
            found = [line for line in lines if optional or not line["name"].startswith("optional__")]
        if sample is not None and sample < len(found):
            found = [found[i * len(found) // sample] for i in range(sample)]
        self._found = found

    def __len__(self) -> int:
        return len(self._found)

    def __iter__(self) -> Iterator[Group]:
        for found in self._found:
            group = json.loads(found.read_text(encoding="utf-8")) if isinstance(found, Path) else found
            name = found.stem if isinstance(found, Path) else found["name"]
            yield Group(name, group["schema"], group["tests"])


class Progress:
    """Says on stderr every few seconds how far it is, and in which group it has been for long."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._done = -1
        self._name, self._since = "", time.monotonic()
        self._over = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def enter(self, name: str) -> None:
        self._done += 1
        self._name, self._since = name, time.monotonic()

    def end(self) -> None:
        self._over.set()

    def _run(self) -> None:
        began = time.monotonic()
        while not self._over.wait(PROGRESS_SECONDS):
            now, done = time.monotonic(), max(0, self._done)
            rate = done / (now - began)
            left = f"{(self._total - done) / rate:.0f} s left" if done else "nothing done yet"
            stuck = f", {now - self._since:.0f} s in {self._name}" if now - self._since > SLOW_SECONDS else ""
            print(f"{done} of {self._total} schemas, {rate:.1f}/s, {left}{stuck}", file=sys.stderr, flush=True)


def spread(values: array[float]) -> dict[str, float]:
    if not values:
        return {}
    p50, p99, most = np.percentile(np.frombuffer(values), (50, 99, 100)).tolist()
    return {"p50": round(p50, 2), "p99": round(p99, 2), "max": round(most, 2)}


def report(suite: Suite) -> dict[str, Any]:
    zeros = dict.fromkeys(("schemas", "schemas compiled", "valid accepted", "valid accepted in the schema's order"), 0)
    zeros |= dict.fromkeys(("valid rejected", "invalid accepted", "invalid rejected", "mask disagreements"), 0)
    zeros |= dict.fromkeys(("valid ended by MatcherError", "invalid ended by MatcherError", "crashes"), 0)
    result: dict[str, Any] = {**zeros, **suite.counts, "refused": dict(suite.refused)}
    result |= {name: spread(values) for name, values in suite.times.items()}
    accepted = [name for name in suite.wrong if name.startswith("invalid accepted")]
    for name, members in {**suite.names, "invalid accepted, the first": accepted}.items():
        result[name] = {"count": len(members), "names": members[:MAX_NAMES]}
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path, help="a .jsonl file, or a directory of .json files")
    parser.add_argument("--backend", default="llguidance", help="or the name of a plug-in")
    parser.add_argument("--relax", action="store_true")
    parser.add_argument("--optional", action="store_true", help="the JSON-Schema-Test-Suite's optional tests too")
    parser.add_argument("--sample", type=int, help="of how many schemas, evenly spread over the sorted names")
    parser.add_argument("--time-limit", type=float, default=10.0, help="seconds for a compile")
    parser.add_argument("--show", type=int, default=0, help="how many wrong answers to list")
    arguments = parser.parse_args()
    groups = Groups(arguments.suite, optional=arguments.optional, sample=arguments.sample)
    tokenizer = Tokenizer.load(resolve_model(EngineConfig.create("smollm2-135m", {})))
    words = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    backend = load_backend(arguments.backend, words, arguments.time_limit)
    suite = Suite(backend, tokenizer, words, relax=arguments.relax, time_limit=arguments.time_limit)
    wall, cpu, progress = time.monotonic(), time.process_time(), Progress(len(groups))
    for group in groups:
        progress.enter(group.name)
        suite.group(group)
    progress.end()
    seconds = {"wall": round(time.monotonic() - wall, 2), "cpu": round(time.process_time() - cpu, 2)}
    backend.close()
    result = {"suite": str(arguments.suite), "sample": arguments.sample, "backend": arguments.backend}
    result |= {"relax": arguments.relax, **report(suite), "seconds": seconds}
    if arguments.show:
        result["wrong"] = suite.wrong[: arguments.show]
    print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
