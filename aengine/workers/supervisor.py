"""One worker process, seen from the host: start it, watch it, end it.

    host                                             worker
    ┌───────────────────────────────┐                ┌───────────────────────────────┐
    │ loop thread                   │  rings         │ main thread: entry -> worker  │
    │   WorkerProcess.channel ──────┼────────────────┼─> WorkerChannel               │
    │                               │  death pipe    │                               │
    │ watch thread: exec, waitpid   ├────────────────┼─> guard thread: end of file?  │
    └───────────────────────────────┘  (write end)   └───────────────────────────────┘

The worker is started by exec of `entry.py`: nothing of the host's state is inherited but the descriptors that it needs.
Its death is told by ``waitpid`` in the watch thread. The host's death is told to it twice: by the end of the death
pipe, whose write end only the host holds, and by PR_SET_PDEATHSIG. That signal comes when the *thread* that forked
ends, not the process; so the thread that forks is the watch thread, which lives exactly as long as the worker.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ..config import EngineConfig, worker_environment
from ..errors import WorkerDiedError
from ..ipc.channel import HostChannel

__all__ = ["DEFAULT_RUNNER", "WorkerProcess"]

logger = logging.getLogger("aengine.workers")

DEFAULT_RUNNER = "aengine.runner.startup:load_runner"
"""``module:function`` that makes the runner in the worker; tests give their own."""

_ENTRY = Path(__file__).with_name("entry.py")
_STDERR_TAIL = 4096  # bytes of a dead worker's stderr that its error shows


class WorkerProcess:
    """One worker. ``on_death`` is called on the loop, once, with what is known, unless `kill` or `close` came first.

    ``channel``: made by ``HostChannel.create`` (in a thread: it takes milliseconds), from now on this object's.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        channel: HostChannel,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[WorkerProcess], None],
        on_death: Callable[[WorkerProcess, WorkerDiedError], None],
        runner: str = DEFAULT_RUNNER,
    ) -> None:
        self.rank = rank
        self.pid = -1
        self._loop = loop
        self._on_death = on_death
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()  # the watch thread has reaped the process, or could not start it
        self._exit = loop.create_future()  # the same, for the loop
        self._lock = threading.Lock()  # of _process, _killed: kill() may come from any thread
        self._killed = False
        self._closed = False
        self._stderr = os.memfd_create(f"aengine-worker-{rank}-stderr", os.MFD_CLOEXEC)
        death_read, self._death_pipe = os.pipe()
        self.channel = channel
        self.channel.open(loop, lambda: on_frames(self))
        self._thread = threading.Thread(
            target=self._watch,
            args=(self._command(config, death_read, runner), worker_environment(config), death_read),
            name=f"aengine-worker-{rank}",
            daemon=True,
        )
        self._thread.start()

    def _command(self, config: EngineConfig, death_read: int, runner: str) -> list[str]:
        """argv of the child: -P and a file of ours, so that nothing in its working directory can shadow a module."""
        package_parent = str(Path(__file__).parents[2])
        return [
            sys.executable,
            "-P",
            str(_ENTRY),
            package_parent,
            str(os.getpid()),
            str(death_read),
            str(self.rank),
            str(config.worker_spin_us),
            self.channel.description,
            runner,
        ]

    # -- the watch thread

    def _watch(self, command: list[str], environment: dict[str, str], death_read: int) -> None:
        error: BaseException | None = None
        try:
            with self._lock:
                if not self._killed:
                    self._process = subprocess.Popen(
                        command,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=self._stderr,
                        stderr=self._stderr,
                        pass_fds=(*self.channel.inherit_fds, death_read),
                        start_new_session=True,  # a Ctrl-C in the host's terminal is the host's to handle
                    )
                    self.pid = self._process.pid
        except OSError as caught:
            error = caught
        finally:
            os.close(death_read)
        code = None
        if self._process is not None:
            code = self._process.wait()
        self._ended.set()
        try:
            self._loop.call_soon_threadsafe(self._reaped, code, error)
        except RuntimeError:  # the loop was closed: nobody is left to tell
            pass

    # -- the loop thread

    def _reaped(self, code: int | None, error: BaseException | None) -> None:
        if not self._exit.done():
            self._exit.set_result(code)
        if self._killed or self._closed:
            return
        self._on_death(self, self._explain(code, error))

    def _explain(self, code: int | None, error: BaseException | None) -> WorkerDiedError:
        if code is None:
            died = WorkerDiedError(f"worker {self.rank} could not be started: {error}", rank=self.rank)
            died.__cause__ = error
            return died
        how = f"with exit code {code}"
        if code < 0:
            try:
                how = f"of {signal.Signals(-code).name}"
            except ValueError:
                how = f"of signal {-code}"
            if code == -signal.SIGKILL:
                how += " (somebody killed it, or the kernel did for want of memory: see dmesg)"
        tail = self.stderr_tail()
        said = f"; it last wrote:\n{tail}" if tail else ""
        return WorkerDiedError(f"worker {self.rank} (pid {self.pid}) died {how}{said}", rank=self.rank, exit_code=code)

    def stderr_tail(self) -> str:
        """The last of what the worker wrote to stdout and stderr."""
        size = os.fstat(self._stderr).st_size
        data = os.pread(self._stderr, _STDERR_TAIL, max(0, size - _STDERR_TAIL))
        return data.decode(errors="replace").strip()

    @property
    def is_alive(self) -> bool:
        return not self._ended.is_set()

    async def wait(self, timeout: float) -> bool:
        """Until the process has ended, at most ``timeout`` seconds. Whether it has."""
        if not self._exit.done():
            await asyncio.wait([self._exit], timeout=timeout)
        return self._ended.is_set()

    def kill(self) -> None:
        """SIGKILL. Immediate, idempotent, from any thread and state; the watch thread reaps."""
        with self._lock:
            self._killed = True
            if self._process is not None and not self._ended.is_set():
                self._process.kill()

    def close(self) -> None:
        """Let go of everything of the host's, once the process has ended or was killed. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        os.close(self._death_pipe)
        os.close(self._stderr)
