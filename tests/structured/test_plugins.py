"""A grammar backend of another package: found by its entry point, asked for by name, harming nobody."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest
from grammar_helpers import allowed, vocabulary

from aengine import GrammarError, InternalError, StructuredOutput
from aengine.engine.structured.backend import advance_batch
from aengine.engine.structured.backends import load_backend
from aengine.engine.structured.compiler import GrammarCompiler
from aengine.engine.structured.spec import GrammarSpec, spec_of

MODULE = """
import threading

GO_ON = threading.Event()


class Matcher:
    def __init__(self, words, rest):
        self.words, self.rest = words, rest

    def fill(self, bitmask, row):
        if self.rest[:1] == b"!":
            raise RuntimeError("its masks are broken")
        ids = [self.words.token_bytes.index(self.rest[:1])] if self.rest else self.words.eos_ids
        for word in range(self.words.row_bytes // 4):
            bitmask[row, word] = sum(1 << i % 32 for i in ids if i // 32 == word)

    def accept(self, token_ids):
        for i, token_id in enumerate(token_ids):
            if self.words.token_bytes[token_id] != self.rest[:1]:
                return i
            self.rest = self.rest[1:]
        return len(token_ids)

    def rollback(self, num_tokens):
        raise NotImplementedError

    def forced_tokens(self):
        return []


class Compiled:
    warnings, num_bytes, mask_seconds = (), 1000, 0.0

    def __init__(self, words, spec):
        self.words, self.spec = words, spec

    def matcher(self):
        return Matcher(self.words, self.spec.text.encode())


class Backend:
    name = "verbatim"

    def __init__(self, vocabulary, timeout):
        assert timeout > 0
        self.vocabulary = vocabulary

    def is_quick(self, spec):
        return True

    def compile(self, spec, on_wait=None):
        if spec.text == "forever":
            GO_ON.wait(60)
        if spec.text == "crash":
            raise ZeroDivisionError("a bug of the plug-in")
        return Compiled(self.vocabulary, spec)

    def close(self):
        pass


def broken(vocabulary, timeout):
    raise OSError("libverbatim.so is missing")
"""
ENTRY_POINTS = """[aengine.grammar_backends]
verbatim = verbatim_grammar:Backend
broken = verbatim_grammar:broken
absent = no_such_module:Backend
"""


@pytest.fixture(autouse=True)
def _package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An installed distribution, as importlib.metadata finds one."""
    (tmp_path / "verbatim_grammar.py").write_text(MODULE)
    info = tmp_path / "verbatim_grammar-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: verbatim-grammar\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(ENTRY_POINTS)
    monkeypatch.syspath_prepend(tmp_path)


def spec(text: str, backend: str = "verbatim") -> GrammarSpec:
    return spec_of(StructuredOutput(regex=text, backend=backend))


async def test_a_plug_in_is_asked_by_its_name() -> None:
    words = vocabulary("tiny")
    compiler = GrammarCompiler(lambda: words)
    compiled = await compiler.compile(spec("ab"))
    assert compiled.spec == GrammarSpec("regex", "ab", backend="verbatim")
    matcher = compiled.matcher()
    a, b = words.token_bytes.index(b"a"), words.token_bytes.index(b"b")
    backend = load_backend("verbatim", words)
    assert allowed(backend, matcher) == {a}
    assert matcher.accept([b]) == 0 and matcher.accept([a, b]) == 2
    assert allowed(backend, matcher) == set(words.eos_ids)
    assert (await compiler.compile(GrammarSpec("regex", "ab"))).spec.backend == "llguidance"
    await compiler.aclose()


async def test_one_that_can_not_be_had_says_why() -> None:
    compiler = GrammarCompiler(lambda: vocabulary("tiny"))
    for name, said in (
        ("verbatm", "no grammar backend 'verbatm': there is 'llguidance', 'absent', 'broken', 'verbatim'"),
        ("broken", "the package 'verbatim-grammar' can't be built: OSError: libverbatim.so is missing"),
        ("absent", "ModuleNotFoundError"),
    ):
        with pytest.raises(GrammarError, match=said) as caught:
            await compiler.compile(spec("a", name))
        assert caught.value.kind == "unsupported"
    assert await compiler.compile(GrammarSpec("regex", "a"))
    await compiler.aclose()


async def test_one_that_raises_ends_its_request_alone() -> None:
    words = vocabulary("tiny")
    compiler = GrammarCompiler(lambda: words)
    with pytest.raises(InternalError, match="ZeroDivisionError: a bug of the plug-in"):
        await compiler.compile(spec("crash"))
    bad = (await compiler.compile(spec("!"))).matcher()
    good = (await compiler.compile(spec("a"))).matcher()
    own = (await compiler.compile(GrammarSpec("regex", "a"))).matcher()
    mask = memoryview(bytearray(3 * words.row_bytes)).cast("i", (3, words.row_bytes // 4))
    failed = advance_batch([(own, []), (bad, []), (good, [])], mask)
    assert list(failed) == [1] and "RuntimeError: its masks are broken" in str(failed[1])
    await compiler.aclose()


async def test_one_that_compiles_for_ever_is_not_waited_for() -> None:
    """Its own bound or none: a request waits no longer than for the engine's own grammars, and others go on."""
    compiler = GrammarCompiler(lambda: vocabulary("tiny"), timeout=0.3)
    await compiler.warm_up()  # what is made once may take longer than that
    plug_in: Any = importlib.import_module("verbatim_grammar")
    try:
        with pytest.raises(GrammarError) as caught:
            await compiler.compile(spec("forever"))
        assert caught.value.kind == "too_complex"
        assert await compiler.compile(spec("ab")) and await compiler.compile(GrammarSpec("regex", "a"))
    finally:
        plug_in.GO_ON.set()
        await compiler.aclose()


async def test_it_never_sees_what_is_larger_than_any_grammar() -> None:
    many = ["a" * 600_000, "b" * 600_000]
    wrong: list[dict[str, Any]] = [{"regex": "a" * 70_000}, {"grammar": "start: " + '"a" ' * 20_000}, {"choice": many}]
    for given in wrong:
        with pytest.raises(GrammarError) as caught:
            spec_of(StructuredOutput(**given, backend="verbatim"))
        assert caught.value.kind == "too_complex", given
