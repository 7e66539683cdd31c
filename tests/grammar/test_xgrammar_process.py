"""xgrammar's compiler process: killed in time, never left behind; and no torch in the host."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import threading
from pathlib import Path

import psutil
import pytest
from grammar_helpers import NEEDS_XGRAMMAR, accepts, matcher_of, tiny, vocabulary
from test_compiler import no_threads, until
from test_hostile import HOSTILE

from aengine.errors import EngineClosedError, GrammarError
from aengine.grammar import xgrammar_process
from aengine.grammar.backend import load_backend
from aengine.grammar.compiler import GrammarCompiler
from aengine.grammar.spec import GrammarSpec


@NEEDS_XGRAMMAR
def test_xgrammar_does_not_bring_torch_in() -> None:
    code = (
        "import sys, threading\n"
        "from aengine.grammar.xgrammar_process import load_core\n"
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
        "from aengine.grammar.xgrammar import XGrammarBackend\n"
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
    from aengine.grammar.xgrammar import XGrammarBackend

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
