"""The limits that a shell sets for what it starts (``ulimit``), and hints for messages where one was hit.

Those of memory are of addresses, not of use. Libraries map far more than they use, and some of them crash or spin where
a mapping is refused. So whatever goes wrong while a worker loads under such a limit is told together with it.
"""

from __future__ import annotations

import errno
import re
import resource

from .cgroups import threads_limit

_NO_FILES = re.compile(r"too many open files|maximum number of files open", re.IGNORECASE)
_NO_THREADS = re.compile(
    r"can't start new thread|thread creation failed|pthread_create|resource temporarily unavailable", re.IGNORECASE
)

_WANTS_MEMORY = re.compile(
    r"(can't|cannot|can not|unable to|failed to) (allocate|map)|not enough memory|can't start new thread", re.IGNORECASE
)


def memory_ulimit_hint() -> str:
    """Return a hint for a message about memory: "" where no limit is set."""
    for option, kind in (("-v", resource.RLIMIT_AS), ("-d", resource.RLIMIT_DATA)):
        limit = resource.getrlimit(kind)[0]
        if limit != resource.RLIM_INFINITY:
            return (
                f"; `ulimit {option}` allows each process {limit // 1024} kB of addresses, probably too few: a "
                f"worker needs 1 GB and twice the model's size on a CPU, and several times the GPU's memory on one. "
                f"Lift it with `ulimit {option} unlimited`, and limit memory by a cgroup, if at all"
            )
    return ""


def open_files_hint() -> str:
    """Return a hint for a message about descriptors of which none is left."""
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return f"; `ulimit -n` allows each process {limit} open files: raise it to 1024 or more, or close some"


def limit_hint(text: str) -> str:
    """Return a hint for the text of an error that a limit of open files, or of processes and threads, brought about; ""
    if it shows neither. Blocking: reads files."""
    if _NO_FILES.search(text):
        return open_files_hint()
    if not _NO_THREADS.search(text):
        return ""
    if hint := memory_ulimit_hint():  # a thread's stack is memory, too
        return hint
    limits = []
    user = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if user != resource.RLIM_INFINITY:
        limits.append(f"`ulimit -u` allows this user {user} threads")
    group = threads_limit()
    if group is not None:
        limits.append(f"the container's pids.max allows {group} (docker run --pids-limit)")
    return (
        f"; no thread can be started: {', '.join(limits) or 'the machine has too many'}: raise that, or set num_threads"
    )


def is_out_of_files(error: BaseException) -> bool:
    """Return whether an error says that this process may open no more files. An error of the system is known by its
    number, as its text is in the user's language; posix_ipc's errors have a text alone."""
    return getattr(error, "errno", None) == errno.EMFILE or bool(_NO_FILES.search(str(error)))


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether a library's error says that the system gave it no memory."""
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    return isinstance(error, ImportError | RuntimeError | OSError) and bool(_WANTS_MEMORY.search(str(error)))
