"""xgrammar's C++ module without torch, and what its compiler process does (see `compile_process`).

`load_core`: ``import xgrammar`` pulls in torch, transformers and triton (2.4 s, 280 MB), though only its kernels for
tensors need them; the host half of aengine never imports torch. So only its submodule of C++ bindings is imported,
under another name (0.3 s, 44 MB), while a finder makes ``import torch`` fail *in this thread*, because apache-tvm-ffi
imports torch too where it can. Nothing changes for other threads, and a later ``import xgrammar`` of the host's own
works. The bindings' signatures are not xgrammar's public interface: hence the narrow range of versions allowed.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import json
import math
import os
import re
import resource
import select
import signal
import struct
import sys
import threading
import time
import types
import warnings
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["load_core", "prepare", "tokenizer_info"]

_PRIVATE_NAME = "_aengine_xgrammar"
_NUM_FIRST_MASKS = 3
_TRIAL_SECONDS = 0.25
"""For the first masks; a grammar that needs longer is slow, however much longer."""
_HEX_ESCAPE = re.compile(r"\\(?:x([0-9a-fA-F]{2})|.)", re.DOTALL)


class _WithoutTorch:
    """A finder by which one thread finds no torch, unless it is loaded already."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name.partition(".")[0] == "torch" and threading.get_ident() == self._thread:
            raise ModuleNotFoundError(f"{name} is left out on purpose", name=name)


@functools.cache
def load_core() -> Any:
    """The C++ classes of xgrammar. Raises ImportError when it is not installed, or not of a known version."""
    loaded = sys.modules.get("xgrammar.base")
    if loaded is not None and getattr(loaded, "_core", None) is not None:
        return loaded._core
    spec = importlib.util.find_spec("xgrammar")
    if spec is None or spec.submodule_search_locations is None:
        raise ModuleNotFoundError("xgrammar is not installed", name="xgrammar")
    package = types.ModuleType(_PRIVATE_NAME)
    package.__path__ = list(spec.submodule_search_locations)
    sys.modules[_PRIVATE_NAME] = package
    finder = _WithoutTorch()
    sys.meta_path.insert(0, finder)
    try:
        importlib.import_module(f"{_PRIVATE_NAME}.load_binding")
        return importlib.import_module(f"{_PRIVATE_NAME}.base")._core
    finally:
        sys.meta_path.remove(finder)


def tokenizer_info(core: Any, token_bytes: Sequence[bytes], vocab_size: int, eos_ids: Sequence[int]) -> Any:
    """The vocabulary as xgrammar has it; equal arguments in host and child make what is serialised fit."""
    raw_bytes = 0
    return core.TokenizerInfo(list(token_bytes), raw_bytes, vocab_size, list(eos_ids), False)


# -- the child


def prepare(first: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """What answers requests; ``first`` is the vocabulary. See `compile_process`."""
    noise = os.memfd_create("xgrammar-warnings")
    os.dup2(noise, 2)  # the library says only on stderr what it does not enforce
    core = load_core()
    info = tokenizer_info(core, first["token_bytes"], first["vocab_size"], first["eos_ids"])
    compiler = core.GrammarCompiler(info, 1, False, -1)

    def answer(request: dict[str, Any]) -> dict[str, Any]:
        os.ftruncate(noise, 0)
        os.lseek(noise, 0, os.SEEK_SET)
        try:
            compiled = _compile(compiler, request)
            text = str(compiled.serialize_json())
        except Exception as error:
            return {"error": str(error)}
        said = os.pread(noise, 1 << 16, 0).decode(errors="replace")
        seconds = _try_masks(functools.partial(_first_masks, core, compiled, first["vocab_size"]))
        if seconds == math.inf:
            return {"error": "cannot accept any text: no token can come, and the text may not end"}
        return {"grammar": text, "warnings": said, "mask_seconds": seconds}

    return answer


def _try_masks(masks: Callable[[], float]) -> float:
    """What ``masks`` returns, or the time that it was given: a mask may take seconds, and nothing can stop it but the
    end of its process. So it gets one of its own, which the grammar outlives."""
    source, target = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about the other thread, which only reads
        pid = os.fork()
    if not pid:
        try:
            resource.setrlimit(resource.RLIMIT_CPU, (1, 1))  # it ends even if this process is killed first
            os.write(target, struct.pack("d", masks()))
        finally:
            os._exit(0)
    os.close(target)
    with os.fdopen(source, "rb") as answers:
        is_done = select.select([source], [], [], _TRIAL_SECONDS)[0]
        answer = answers.read(8) if is_done else b""
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    seconds: float = struct.unpack("d", answer)[0] if len(answer) == 8 else _TRIAL_SECONDS
    return seconds


def _first_masks(core: Any, compiled: Any, vocab_size: int) -> float:
    """CPU time of the slowest of the first masks; infinite, when there is nothing that can come."""
    import numpy as np

    matcher = core.GrammarMatcher(compiled, None, False, -1, None)
    words = np.zeros((1, (vocab_size + 31) // 32), np.int32)
    slowest = 0.0
    for _ in range(_NUM_FIRST_MASKS):
        begun = time.thread_time()
        try:
            limited = matcher.fill_next_token_bitmask(words, 0, False)
        except RuntimeError:
            return math.inf
        slowest = max(slowest, time.thread_time() - begun)
        if not limited:
            words[:] = -1
        ids = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")[:vocab_size])
        if not ids.size:
            return math.inf
        # Any token leads on. Those in the middle are longer than the first, single bytes, and seldom an end.
        if not matcher.accept_token(int(ids[ids.size // 2]), False) or matcher.is_terminated():
            break
    return slowest


def _compile(compiler: Any, request: dict[str, Any]) -> Any:
    kind, text = request["kind"], request["text"]
    if kind == "json_schema":
        compact = request["whitespace"] == "compact"
        # indent, separators, strict_mode (no properties beside the named), blanks at most, properties in any order
        return compiler.compile_json_schema(
            text, not compact, None, (", ", ": ") if compact else None, False, None, False
        )
    if kind == "regex":
        # after \\x it would read any number of digits
        return compiler.compile_regex(_HEX_ESCAPE.sub(lambda m: f"\\u00{m[1]}" if m[1] else m[0], text))
    if kind == "lark":
        return compiler.compile_lark(text, [], [])
    if kind == "choice":
        text = "root ::= " + " | ".join(map(_ebnf_string, json.loads(text)))
    return compiler.compile_grammar_from_strings(text, "root")


def _ebnf_string(text: str) -> str:
    """Four digits for control characters: after \\x the library would read any number of them."""
    letters = (f"\\u{ord(c):04x}" if c < " " or c == "\x7f" else "\\" + c if c in '"\\' else c for c in text)
    return '"' + "".join(letters) + '"'
