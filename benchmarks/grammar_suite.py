"""How right a grammar backend is: the instances of a JSON schema test suite, token by token.

    python benchmarks/grammar_suite.py /path/to/json-schema-test-suite.jsonl [--backend xgrammar] [--relax] [--optional]

Each line of the file is a group: ``name``, ``schema``, ``tests`` (``valid``, ``data``). Of the schemas that compile,
each instance is written as ``json.dumps`` writes it, tokenised with SmolLM2's tokenizer and given to a matcher, with a
mask before each token; it is accepted when the end may follow. Printed as JSON: how many valid and invalid instances
were accepted and rejected, how often a mask allowed what ``accept`` refused, and the seconds. The other way round is
no fault: where a text is forced, llguidance's masks allow only the token that the tokenizer would write.

A valid instance may be rejected rightly: a grammar fixes the order of properties. It is counted apart when the instance
passes once its properties are in the schema's order.
"""

from __future__ import annotations

import argparse
import json
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer import Tokenizer
from aengine.errors import GrammarError
from aengine.grammar.backend import Backend, Compiled, MatcherError, load_backend
from aengine.grammar.spec import GrammarSpec
from aengine.grammar.vocabulary import Vocabulary


class Suite:
    """Counts what happens to each group."""

    def __init__(self, backend: Backend, tokenizer: Tokenizer, words: Vocabulary, *, relax: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.refused: Counter[str] = Counter()
        self.wrong: list[str] = []
        self._backend = backend
        self._tokenizer = tokenizer
        self._relax = relax
        self._end = words.eos_ids[0]
        self._mask = np.zeros((1, words.row_bytes // 4), np.int32)

    def group(self, name: str, schema: Any, tests: list[dict[str, Any]]) -> None:
        spec = GrammarSpec(
            "json_schema",
            json.dumps(schema, ensure_ascii=False),
            relax=self._relax,
            backend=self._backend.name,  # type: ignore[arg-type]
        )
        self.counts["schemas"] += 1
        try:
            compiled = self._backend.compile(spec)
        except GrammarError as error:
            self.refused[error.kind] += 1
            self.counts["tests of refused schemas"] += len(tests)
            return
        except Exception as error:
            self.counts["crashes"] += 1
            self.wrong.append(f"crash: {name}: {error}")
            return
        self.counts["schemas compiled"] += 1
        for test in tests:
            self._test(compiled, name, schema, test)

    def _test(self, compiled: Compiled, name: str, schema: Any, test: dict[str, Any]) -> None:
        valid = "valid" if test["valid"] else "invalid"
        shown = f"{name}: {json.dumps(test['data'])[:80]}"
        try:
            accepted = self._passes(compiled, test["data"])
            if test["valid"] and not accepted and self._passes(compiled, in_order(test["data"], schema)):
                self.counts["valid accepted in the schema's order"] += 1
                return
        except MatcherError as error:
            self.counts[f"{valid} ended by MatcherError"] += 1
            self.wrong.append(f"matcher: {shown}: {error}")
            return
        outcome = f"{valid} {'accepted' if accepted else 'rejected'}"
        self.counts[outcome] += 1
        if accepted != test["valid"]:
            self.wrong.append(f"{outcome}: {shown}")

    def _passes(self, compiled: Compiled, data: Any) -> bool:
        matcher = compiled.matcher()
        text = json.dumps(data, ensure_ascii=False)
        for token_id in [*self._tokenizer.encode(text, add_special_tokens=False), self._end]:
            matcher.fill(self._mask, 0)
            allowed = bool(int(self._mask[0, token_id // 32]) >> token_id % 32 & 1)
            accepted = matcher.accept([token_id]) == 1
            self.counts["tokens"] += 1
            if allowed and not accepted:
                self.counts["mask disagreements"] += 1
            if accepted and not allowed:
                self.counts["accepted, but not how the tokenizer writes it"] += 1
            if not accepted:
                return False
        return True


def in_order(data: Any, schema: Any) -> Any:
    """The instance with its properties in the order of the schema's ``properties``, as deep as that is plain."""
    if isinstance(data, dict) and isinstance(schema, dict):
        properties = schema.get("properties", {})
        keys = [key for key in properties if key in data] + [key for key in data if key not in properties]
        return {key: in_order(data[key], properties.get(key)) for key in keys}
    if isinstance(data, list) and isinstance(schema, dict):
        return [in_order(item, schema.get("items")) for item in data]
    return data


def groups(path: Path, *, optional: bool) -> Iterator[tuple[str, Any, list[dict[str, Any]]]]:
    with path.open(encoding="utf-8") as file:
        for line in file:
            group = json.loads(line)
            if optional or not group["name"].startswith("optional__"):
                yield group["name"], group["schema"], group["tests"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--backend", choices=["llguidance", "xgrammar"], default="llguidance")
    parser.add_argument("--relax", action="store_true")
    parser.add_argument("--optional", action="store_true", help="the suite's optional tests too")
    parser.add_argument("--show", type=int, default=0, help="how many wrong answers to list")
    arguments = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(EngineConfig.create("smollm2-135m", {})))
    words = Vocabulary.of(tokenizer, tokenizer.vocab_size)
    backend = load_backend(arguments.backend, words, 10.0)
    suite = Suite(backend, tokenizer, words, relax=arguments.relax)
    wall, cpu = time.monotonic(), time.process_time()
    for name, schema, tests in groups(arguments.suite, optional=arguments.optional):
        suite.group(name, schema, tests)
    seconds = {"wall": round(time.monotonic() - wall, 2), "cpu": round(time.process_time() - cpu, 2)}
    backend.close()
    zeros = dict.fromkeys(("valid accepted", "valid rejected", "invalid accepted", "invalid rejected"), 0)
    zeros |= dict.fromkeys(("mask disagreements", "crashes"), 0)
    result: dict[str, Any] = {"backend": arguments.backend, "relax": arguments.relax, **zeros, **suite.counts}
    result |= {"refused": dict(suite.refused), "seconds": seconds}
    if arguments.show:
        result["wrong"] = suite.wrong[: arguments.show]
    print(json.dumps(result, indent=2, ensure_ascii=False))


if __name__ == "__main__":
    main()
