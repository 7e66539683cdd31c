"""The limits of memory that a shell sets for what it starts (``ulimit``): of addresses, not of use.

Libraries map far more than they use, and some of them crash or spin where a mapping is refused. So whatever goes wrong
while a worker loads under such a limit is told together with it.
"""

from __future__ import annotations

import errno
import re
import resource

__all__ = ["is_want_of_memory", "memory_ulimit_hint"]

_WANTS_MEMORY = re.compile(
    r"(can't|cannot|can not|unable to|failed to) (allocate|map)|not enough memory|can't start new thread", re.IGNORECASE
)


def memory_ulimit_hint() -> str:
    """What to add to a message about memory: "" where no limit is set."""
    for option, kind in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            return (
                f"; `ulimit {option}` allows each process {limit // 1024} kB of addresses, probably too few: a "
                f"worker needs 1 GB and twice the model's size on a CPU, and several times the GPU's memory on one. "
                f"Lift it with `ulimit {option} unlimited`, and limit memory by a cgroup, if at all"
            )
    return ""


def is_want_of_memory(error: BaseException) -> bool:
    """Whether a library's error says that no memory was to be had from the system."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, ImportError | RuntimeError | OSError) and bool(_WANTS_MEMORY.search(str(error)))
