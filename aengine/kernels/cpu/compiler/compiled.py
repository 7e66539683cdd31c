"""Compiles modules to machine code for this processor, and loads it."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import llvmlite.binding as llvm

from .emit import Module
from .target import Target


def compile_module(module: Module, target: Target) -> bytes:
    """Machine code of a module, as an object file."""
    machine = target.machine()
    parsed = llvm.parse_assembly(str(module.llvm))
    parsed.triple = target.triple
    parsed.data_layout = str(machine.target_data)
    options = llvm.PipelineTuningOptions(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = False
    builder = llvm.create_pass_builder(machine, options)
    builder.getModulePassManager().run(parsed, builder)
    return bytes(machine.emit_object(parsed))


class LoadedCode:
    """Functions of an object file, ready to be called."""

    def __init__(self, code: bytes, target: Target) -> None:
        self._engine: Any = llvm.create_mcjit_compiler(llvm.parse_assembly(""), target.machine())
        self._engine.add_object_file(llvm.ObjectFileRef.from_data(code))
        self._engine.finalize_object()

    def address(self, name: str) -> int:
        """The address of a function."""
        return int(self._engine.get_function_address(name))


def forget_compiler() -> None:
    """Hand the pages of LLVM's own code back: 30 MB. They are its file's, and read again where it compiles again."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        if line.endswith("/libllvmlite.so") and " r-xp " in line:
            begin, end = (int(address, 16) for address in line.partition(" ")[0].split("-"))
            ctypes.CDLL(None).madvise(ctypes.c_void_p(begin), ctypes.c_size_t(end - begin), 4)  # MADV_DONTNEED
