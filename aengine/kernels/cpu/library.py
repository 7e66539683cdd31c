"""The compiled kernels of this process, and the threads that run them.

A kernel is ``void (words, rows, chunk, thread)``: ``words`` are its arguments in memory, as `Tape` lays them down. Each
file of kernels names them in its ``KERNELS``: what writes each into a module, for a processor. A name may go on with
what the code is made for: "attend.64.3.float32" is "attend", written with "64", "3" and "float32".
"""

from __future__ import annotations

import platform
import threading
from collections.abc import Callable, Iterable, Sequence
from functools import cache

from .compiler.code_cache import CodeCache, code_cache, code_key
from .compiler.compiled import LoadedCode, compile_module, forget_compiler
from .compiler.emit import I64, POINTER, Module
from .compiler.target import Target, WriteKernel, host
from .team import COUNTER_WORDS, OP_WORDS, Team, aligned_words, write_team


def _kernels() -> dict[str, WriteKernel]:
    from . import attention, experts, residual, rotary, rows, short_conv
    from .packed import packing, products, tables

    modules = rows, products, packing, residual, rotary, attention, tables, experts, short_conv
    return {name: writer for module in modules for name, writer in module.KERNELS.items()}


def write_kernels(module: Module, names: Iterable[str], target: Target) -> None:
    """Write kernels into a module, for a processor."""
    writers = _kernels()
    for name in names:
        with module.function(name, words=POINTER, rows=I64, chunk=I64, thread=I64) as f:
            writer, *parameters = name.split(".")
            writers[writer](f, target, *parameters)


class Library:
    """Kernels that have been compiled, by name, and a team."""

    def __init__(self, target: Target, num_threads: int, cache: CodeCache) -> None:
        self._target = target
        self._cache = cache
        self._addresses: dict[str, int] = {}
        self._loaded: list[LoadedCode] = []
        team = self._load(["team"], lambda module: write_team(module, platform.machine()))
        self._op, self._counters = aligned_words(OP_WORDS), aligned_words(COUNTER_WORDS)
        self._op_address = self._op.ctypes.data
        self._lock, self._compiling = threading.Lock(), threading.Lock()
        self.team = Team(num_threads, team.address("team_run"), team.address("team_thread"))

    def addresses(self, names: Iterable[str]) -> dict[str, int]:
        """Return the addresses of kernels by name; what is missing is compiled, together."""
        with self._compiling:
            missing = sorted(set(names) - self._addresses.keys())
            if missing:
                code = self._load(missing, lambda module: write_kernels(module, missing, self._target))
                self._addresses |= {name: code.address(name) for name in missing}
        return self._addresses

    def run_once(self, kernel: str, words: list[int], rows: int) -> None:
        """Run one op, which is laid down as a `Tape` does; returns when it is done."""
        words[0] = self._addresses.get(kernel) or self.addresses([kernel])[kernel]
        with self._lock:
            self._op[: len(words)] = words
            self.team.run(self._op_address, 1, rows, self._counters)

    def _load(self, names: Sequence[str], write: Callable[[Module], None]) -> LoadedCode:
        """Load functions. ``write``: writes them into a module, if they are not in the cache."""
        key = code_key(names, self._target)
        code = self._cache.read(key)
        if code is None:
            module = Module(names[0])
            write(module)
            code = compile_module(module, self._target)
            self._cache.write(key, code)
        self._loaded.append(LoadedCode(code, self._target))
        forget_compiler()
        return self._loaded[-1]


_num_threads = 1


def set_num_threads(count: int) -> None:
    """Say how many threads run kernels, before the first one runs."""
    global _num_threads
    _num_threads = count


_making = threading.Lock()


def library() -> Library:
    """The kernels of this process. Weights are packed by several threads, any of which may be the first to ask."""
    with _making:
        return _library()


@cache
def _library() -> Library:
    return Library(host(), _num_threads, code_cache())
