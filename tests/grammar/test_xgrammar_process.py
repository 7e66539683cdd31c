"""xgrammar's compiler process: killed in time, never left behind; and no torch in the host."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from grammar_helpers import NEEDS_XGRAMMAR, accepts, matcher_of, tiny, vocabulary
from test_hostile import HOSTILE

from aengine.errors import GrammarError
from aengine.grammar import xgrammar_process
from aengine.grammar.backend import load_backend
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


def test_a_missing_xgrammar_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    xgrammar_process.load_core.cache_clear()
    monkeypatch.setattr(xgrammar_process.importlib.util, "find_spec", lambda name: None)
    monkeypatch.delitem(sys.modules, "xgrammar.base", raising=False)
    with pytest.raises(GrammarError, match=r"pip install aengine\[xgrammar\]") as caught:
        load_backend("xgrammar", vocabulary("tiny"))
    assert caught.value.kind == "unsupported"
