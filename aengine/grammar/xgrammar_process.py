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
import os
import sys
import threading
import types
from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["load_core", "prepare", "tokenizer_info"]

_PRIVATE_NAME = "_aengine_xgrammar"


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
            text = str(_compile(compiler, request).serialize_json())
        except Exception as error:
            return {"error": str(error)}
        return {"grammar": text, "warnings": os.pread(noise, 1 << 16, 0).decode(errors="replace")}

    return answer


def _compile(compiler: Any, request: dict[str, Any]) -> Any:
    kind, text = request["kind"], request["text"]
    if kind == "json_schema":
        compact = request["whitespace"] == "compact"
        # indent, separators, strict_mode (no properties beside the named), blanks at most, properties in any order
        return compiler.compile_json_schema(
            text, not compact, None, (", ", ": ") if compact else None, False, None, False
        )
    if kind == "regex":
        return compiler.compile_regex(text)
    if kind == "lark":
        return compiler.compile_lark(text, [], [])
    if kind == "choice":
        text = "root ::= " + " | ".join(map(_ebnf_string, json.loads(text)))
    return compiler.compile_grammar_from_strings(text, "root")


def _ebnf_string(text: str) -> str:
    letters = (f"\\x{ord(c):02x}" if c < " " or c == "\x7f" else "\\" + c if c in '"\\' else c for c in text)
    return '"' + "".join(letters) + '"'
