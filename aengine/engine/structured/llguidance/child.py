"""The process in which one grammar is tried: see trial.py. Run by path, so it imports nothing of aengine at first."""

from __future__ import annotations

import os
import resource
import sys
import threading
import time

_GUARD_SECONDS = 0.5
_STACK_BYTES = 4 << 20
"""Half of what a thread of the host has: what a recursion takes here it has there."""


def main(host_pid: int, max_bytes: int, search_path: str) -> None:
    """Compile the grammar on stdin, and write the library's error message to stdout if it refuses."""
    threading.Thread(target=_guard, args=(host_pid,), daemon=True).start()
    sys.path[:] = search_path.split(os.pathsep)
    import msgpack

    from aengine.engine.structured.llguidance.backend import LLGuidanceBackend
    from aengine.engine.structured.llguidance.trial import DONE, READY
    from aengine.engine.structured.vocabulary import Vocabulary

    unpacker = msgpack.Unpacker(sys.stdin.buffer, max_buffer_size=0)
    grammar, header = unpacker.unpack(), unpacker.unpack()
    vocabulary = Vocabulary(
        vocab_size=header["vocab_size"],
        token_bytes=tuple(unpacker),
        eos_ids=tuple(header["eos_ids"]),
        special_ids=frozenset(header["special_ids"]),
    )
    backend = LLGuidanceBackend(vocabulary, fill_threads=1)
    os.write(1, READY)
    _limit_memory(max_bytes)

    def compile_and_tell() -> None:
        message = ""
        try:
            backend.try_out(grammar)
        except (KeyboardInterrupt, SystemExit, MemoryError):
            raise
        except BaseException as error:  # ValueError, and pyo3's PanicException, which is no Exception
            message = str(error)
        os.write(1, DONE + message.encode(errors="replace")[:60_000])  # one write, of less than a pipe holds

    threading.stack_size(_STACK_BYTES)
    thread = threading.Thread(target=compile_and_tell)
    thread.start()
    thread.join()


def _guard(host_pid: int) -> None:
    """End the process, whatever it is doing, when its host is gone."""
    while os.getppid() == host_pid:
        time.sleep(_GUARD_SECONDS)
    os._exit(0)


def _limit_memory(max_bytes: int) -> None:
    """Count from what it has now. Beyond, the library ends the process."""
    with open("/proc/self/statm") as file:
        pages = int(file.read().split()[0])
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = pages * resource.getpagesize() + max_bytes
    resource.setrlimit(resource.RLIMIT_AS, (limit if hard == resource.RLIM_INFINITY else min(limit, hard), hard))


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3])
