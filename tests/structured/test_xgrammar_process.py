"""xgrammar's compiler process: killed in time, never left behind; and no torch in the host."""

from __future__ import annotations

import asyncio
import json
import math
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import psutil
import pytest
from grammar_helpers import NEEDS_XGRAMMAR, accepts, allowed, backend_of, matcher_of, schema_spec, tiny, vocabulary
from test_compiler import no_threads, until
from test_hostile import HOSTILE

from aengine.errors import EngineClosedError, GrammarError
from aengine.structured import xgrammar_process
from aengine.structured.backend import Matcher, load_backend
from aengine.structured.compiler import GrammarCompiler
from aengine.structured.spec import GrammarSpec


@NEEDS_XGRAMMAR
def test_xgrammar_does_not_bring_torch_in() -> None:
    code = (
        "import sys, threading\n"
        "from aengine.structured.xgrammar_process import load_core\n"
        "finders = list(sys.meta_path)\n"
        "core = load_core()\n"
        "assert core.GrammarMatcher and load_core() is core\n"
        "assert sys.meta_path == finders\n"
        "assert not {'torch', 'transformers', 'triton', 'xgrammar'} & {m.split('.')[0] for m in sys.modules}\n"
        "import xgrammar\n"
        "info = xgrammar.TokenizerInfo([b'a', b'b', b''], xgrammar.VocabType.RAW, stop_token_ids=[2])\n"
        "grammar = xgrammar.GrammarCompiler(info).compile_regex('ab')\n"
        "assert xgrammar.GrammarMatcher(grammar).accept_token(0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@NEEDS_XGRAMMAR
def test_xgrammar_compilers_end_with_a_killed_host() -> None:
    """In the middle of a compile that would take far longer."""
    code = (
        "import sys\n"
        "from grammar_helpers import vocabulary\n"
        "from aengine.structured.xgrammar import XGrammarBackend\n"
        "from test_hostile import HOSTILE\n"
        "backend = XGrammarBackend(vocabulary('smollm2'), timeout=600.0)\n"
        "print(backend._processes._idle[0]._process.pid, flush=True)\n"
        "backend.compile(HOSTILE['long enum'])\n"
    )
    paths = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); "
    host = subprocess.Popen([sys.executable, "-c", paths + code], stdout=subprocess.PIPE, text=True)
    assert host.stdout is not None
    child = psutil.Process(int(host.stdout.readline()))
    host.kill()
    host.wait()
    host.stdout.close()
    psutil.wait_procs([child], timeout=60)
    assert not child.is_running()


@NEEDS_XGRAMMAR
def test_a_killed_xgrammar_compiler_is_replaced() -> None:
    from aengine.structured.xgrammar import XGrammarBackend

    backend = XGrammarBackend(vocabulary("tiny"), timeout=0.3)
    try:
        (first,) = backend._processes._idle
        with pytest.raises(GrammarError) as caught:
            backend.compile(HOSTILE["long enum"])
        assert caught.value.kind == "too_complex"
        (second,) = backend._processes._idle
        assert second is not first
        assert not second.is_ready  # started for the next one, but not waited for
        assert first._process.wait(10) == -9
        second._process.kill()
        second._process.wait()
        with pytest.raises(GrammarError, match="failed"):
            backend.compile(GrammarSpec("regex", "ab"))
        backend._timeout = 60.0
        assert accepts(matcher_of(backend, GrammarSpec("regex", "ab")), tiny(), "ab")
    finally:
        backend.close()
    with pytest.raises(GrammarError, match="closed"):
        backend.compile(GrammarSpec("regex", "ab"))


@NEEDS_XGRAMMAR
@pytest.mark.usefixtures("no_blocking")
async def test_xgrammar_leaves_no_process_behind() -> None:
    words = await asyncio.to_thread(vocabulary, "tiny")
    compiler = GrammarCompiler(words, timeout=20.0)
    grammar = await compiler.compile(GrammarSpec("regex", "ab", backend="xgrammar"))
    assert await asyncio.to_thread(accepts, grammar.matcher(), tiny(), "ab")
    (process,) = compiler._backends.get("xgrammar")._processes._idle  # type: ignore[attr-defined]
    await compiler.aclose()
    assert await asyncio.to_thread(process._process.wait, 30) == -9
    for thread in threading.enumerate():
        if thread.name == "aengine-grammar-reaper":
            await asyncio.to_thread(thread.join)


@NEEDS_XGRAMMAR
@pytest.mark.usefixtures("no_blocking")
async def test_a_slow_xgrammar_compile_is_killed_at_close() -> None:
    words = await asyncio.to_thread(vocabulary, "smollm2")
    compiler = GrammarCompiler(words, timeout=600.0)
    slow = GrammarSpec("json_schema", '{"type":"string","maxLength":3000}', backend="xgrammar")
    await compiler.warm_up("xgrammar")
    (process,) = compiler._backends.get("xgrammar")._processes._idle  # type: ignore[attr-defined]
    task = asyncio.create_task(compiler.compile(slow))
    await until(lambda: not compiler._backends.get("xgrammar")._processes._idle)  # type: ignore[attr-defined]
    await compiler.aclose()
    with pytest.raises(EngineClosedError):
        await task
    assert await asyncio.to_thread(process._process.wait, 30) == -9
    await no_threads()


def test_a_missing_xgrammar_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    xgrammar_process.load_core.cache_clear()
    monkeypatch.setattr(xgrammar_process.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "xgrammar.base", raising=False)
    with pytest.raises(GrammarError, match=r"pip install aengine\[xgrammar\]") as caught:
        load_backend("xgrammar", vocabulary("tiny"))
    assert caught.value.kind == "unsupported"


LETTERS = [*map(chr, range(32)), "\x7f", "\x85", *'"\\abf019-]Aé\u2028\U0001f600\U0010ffff']


def language(matcher: Matcher, most_texts: int) -> set[str]:
    """Every text that may come, byte by byte."""
    backend = backend_of("xgrammar", "tiny")
    ids = {id: text for id, text in enumerate(vocabulary("tiny").token_bytes) if len(text) == 1}
    texts, todo = set(), [(matcher, b"")]
    while todo:
        place, text = todo.pop()
        if place.is_accepting:
            texts.add(text.decode(errors="replace"))
        assert len(texts) + len(todo) <= most_texts, texts
        for id in allowed(backend, place) & ids.keys():
            onward = place.clone()
            assert onward.accept([id]) == 1
            todo.append((onward, text + ids[id]))
    return texts


@NEEDS_XGRAMMAR
def test_exactly_the_options_of_a_choice_may_come() -> None:
    """A newline followed by hex digits came as another character."""
    rng = random.Random(5)
    lists = [["a\nb"], ["\n0a", "\x7fb", "\0"], ['"', "\\", "\\n", '\\"']]
    lists += [["".join(rng.choices(LETTERS, k=rng.randint(1, 5))) for _ in range(4)] for _ in range(40)]
    for options in lists:
        matcher = matcher_of(backend_of("xgrammar", "tiny"), GrammarSpec("choice", json.dumps(sorted(set(options)))))
        assert language(matcher, 200) == set(options)


@NEEDS_XGRAMMAR
@pytest.mark.parametrize(
    ("regex", "text"), [(r"\x0ab", "\nb"), (r"\x41\x42b", "ABb"), (r"\x7f1", "\x7f1"), (r"\\x41b", r"\x41b")]
)
def test_hex_escapes_of_a_regex_have_two_digits(regex: str, text: str) -> None:
    assert language(matcher_of(backend_of("xgrammar", "tiny"), GrammarSpec("regex", regex)), 9) == {text}


@NEEDS_XGRAMMAR
def test_slow_masks_are_known_when_compiled() -> None:
    """Some take seconds: not in the host, and not to their end."""
    backend = backend_of("xgrammar", "smollm2")
    assert backend.compile(GrammarSpec("regex", r"(\w+\s?){1,20}\.")).mask_seconds > 0.02
    assert backend.compile(schema_spec({"type": "object"})).mask_seconds < 0.004
    assert backend.compile(GrammarSpec("regex", "ab")).mask_seconds < 0.004


@NEEDS_XGRAMMAR
def test_masks_that_do_not_end_are_given_up() -> None:
    begun, before = time.monotonic(), psutil.Process().children()
    assert xgrammar_process._try_masks(lambda: time.sleep(60) or 0.0) == xgrammar_process._TRIAL_SECONDS
    assert time.monotonic() - begun < 20
    assert xgrammar_process._try_masks(lambda: 0.5) == 0.5
    assert xgrammar_process._try_masks(lambda: math.inf) == math.inf
    assert psutil.Process().children() == before
