"""The processor that kernels are compiled for: its vectors and its dot products, and whether they can be compiled."""

from __future__ import annotations

import ctypes
import logging
import mmap
import platform
import re
from collections.abc import Callable
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

logger = logging.getLogger("aengine.runner")

_OLDEST_LLVMLITE = (0, 45)
"""Its LLVM 20 is the first whose pointers have no types. Vectors of int32 as operands of dot products (of 4 bytes, or 2
bfloat16, a lane) are understood by all since: LLVM 22 has others, and takes these."""


_INSTRUCTIONS = {
    "avx2": "AVX2",
    "avxvnni": "AVX-VNNI",
    "avx512f": "AVX-512",
    "avx512vnni": "AVX-512 VNNI",
    "avx512bf16": "AVX-512 bf16",
    "amx-int8": "AMX int8",
    "amx-bf16": "AMX bf16",
    "neon": "NEON",
    "dotprod": "NEON dot products",
    "i8mm": "NEON int8 matrices",
}
"""What matters to a model, by LLVM's names."""


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
        import llvmlite

        return f"{' '.join(map(str, astuple(self)))} llvmlite {llvmlite.__version__}"

    def has(self, feature: str) -> bool:
        return f"+{feature}" in self.features.split(",")

    def machine(self) -> Any:
        """LLVM's compiler for this processor."""
        import llvmlite.binding as llvm

        return llvm.Target.from_triple(self.triple).create_target_machine(
            cpu=self.cpu, features=self.features, opt=2, reloc="default", codemodel="jitdefault", jit=True
        )


WriteKernel = Callable[..., None]
"""Writes the body of a kernel, given a Function, a Target and what its name says beyond the first dot (library.py)."""


@cache
def host() -> Target:
    """This machine's processor, as LLVM finds it by asking the processor itself, and the system whether it saves the
    registers of AVX and AVX-512: under an emulator, or where the system switches some off, what is really there. AMX is
    there if the system lets this process use it, which is asked for here, for all of its threads."""
    import llvmlite.binding as llvm

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    features = llvm.get_host_cpu_features()
    if features.get("amx-tile", False) and not _may_use_tiles():
        logger.info("AMX is not used: the system does not let this process use its registers")
        features.update({name: False for name in features if name.startswith("amx-")})
    has_vnni = all(features.get(name, False) for name in ("avx512f", "avx512bw", "avx512vl", "avx512vnni"))
    return Target(llvm.get_process_triple(), llvm.get_host_cpu_name(), features.flatten(), has_vnni)


_SYS_ARCH_PRCTL, _GET_PERMITTED, _ASK_FOR, _TILE_DATA = 158, 0x1022, 0x1023, 18


def _may_use_tiles() -> bool:
    """Ask the system for the registers of AMX; returns whether it has given them. Refused are they by kernels before
    Linux 5.16, by some emulators and sandboxes, and to a process with a signal stack that has no room for them."""
    libc = ctypes.CDLL(None)
    permitted = ctypes.c_uint64()
    asked = libc.syscall(_SYS_ARCH_PRCTL, _ASK_FOR, _TILE_DATA)
    told = libc.syscall(_SYS_ARCH_PRCTL, _GET_PERMITTED, ctypes.byref(permitted))
    return asked == told == 0 and bool(permitted.value >> _TILE_DATA & 1)


def instructions() -> list[str]:
    """The vector instructions of this processor that matter to a model, by the names that its makers use."""
    features = host().features.split(",")
    return [name for feature, name in _INSTRUCTIONS.items() if f"+{feature}" in features]


@cache
def unavailable() -> str | None:
    """Why no kernel can be compiled and run here, with the cure, for a log line; None: they can be."""
    machine = platform.machine()
    if platform.system() != "Linux" or machine not in ("x86_64", "aarch64"):
        return f"they are for Linux on x86-64 and arm64, and this is {platform.system()} on {machine}"
    try:
        import llvmlite
        import llvmlite.binding
    except ImportError:
        return "llvmlite is not installed: pip install 'aengine-llm[cpu]'"
    except Exception as error:  # its library is missing, or needs a newer C library
        return f"llvmlite can't be loaded ({error}): pip install --force-reinstall llvmlite"
    found = re.match(r"(\d+)\.(\d+)", llvmlite.__version__)
    if found is None or tuple(map(int, found.groups())) < _OLDEST_LLVMLITE:
        oldest = ".".join(map(str, _OLDEST_LLVMLITE))
        return f"llvmlite {llvmlite.__version__} is too old: pip install 'llvmlite>={oldest}'"
    missing = [name for name in ("avx2", "fma", "f16c") if f"+{name}" not in host().features.split(",")]
    if machine == "x86_64" and missing:
        return f"this processor has no {', '.join(missing).upper()}: use a machine that has"
    if not _may_execute():
        return (
            "the system lets no process execute what it has written to memory: allow it "
            "(MemoryDenyWriteExecute=no in a systemd unit; SELinux's execmem)"
        )
    return None


def _may_execute() -> bool:
    """Whether memory that can be written may become code: LLVM's loader does not ask, and crashes."""
    libc = ctypes.CDLL(None)
    with mmap.mmap(-1, mmap.PAGESIZE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as memory:
        first = ctypes.c_char.from_buffer(memory)
        address, size = ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(mmap.PAGESIZE)
        is_allowed: bool = libc.mprotect(address, size, mmap.PROT_READ | mmap.PROT_EXEC) == 0
        del first
    return is_allowed
