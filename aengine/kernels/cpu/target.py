"""The processor that kernels are compiled for: its vectors and its dot products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import llvmlite
import llvmlite.binding as llvm

from .emit import Function

__all__ = ["Target", "WriteKernel", "host"]


@dataclass(frozen=True, slots=True)
class Target:
    """What a processor has, as LLVM names it."""

    triple: str
    cpu: str
    features: str  # "+avx2,-avx512f,..."
    has_vnni: bool = False  # AVX-512 VNNI on vectors of 512 bits

    @property
    def key(self) -> str:
        """What compiled code depends on, the code's own text aside."""
        return f"{self.triple} {self.cpu} {self.features} llvmlite {llvmlite.__version__}"

    def machine(self) -> Any:
        """LLVM's compiler for this processor."""
        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, reloc="default", codemodel="jitdefault", jit=True
        )


WriteKernel = Callable[[Function, Target], None]
"""Writes the body of a kernel, see library.py."""


@cache
def host() -> Target:
    """This machine's processor. LLVM asks it itself: under an emulator, what the emulator says."""
    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    has_vnni = all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl", "avx512vnni"))
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), has_vnni)
