"""Compiles modules to machine code for this processor, and loads it."""

from __future__ import annotations

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
