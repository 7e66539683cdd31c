"""The host's side of a worker process: starts it, watches it, ends it.

    host                                             worker
    ┌───────────────────────────────┐                ┌───────────────────────────────┐
    │ loop thread                   │  rings         │ main thread: entry -> worker  │
    │   WorkerProcess.channel ──────┼────────────────┼─> WorkerChannel               │
    │                               │  death pipe    │                               │
    │ watch thread: exec, waitpid   ├────────────────┼─> guard thread: end of file?  │
    └───────────────────────────────┘  (write end)   └───────────────────────────────┘

The worker is started by exec of `entry.py`: nothing of the host's state is inherited but the descriptors it needs.
Its death is seen by ``waitpid`` in the watch thread. It sees the host's death in two ways: by the end of the death
pipe, whose write end only the host holds (and its forks, which may outlive it), and by PR_SET_PDEATHSIG. That signal
comes when the *thread* that forked ends, not the process; so the thread that forks is the watch thread, which lives
exactly as long as the worker.
"""

from __future__ import annotations

import asyncio
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING
from weakref import WeakMethod

from ...config import PACKAGE_FOLDER, EngineConfig, thread_environment, worker_environment
from ...errors import EngineError, WorkerDiedError
from ...ipc.channel import HostChannel
from ...limits.registry import WORKERS, target_of
from ...limits.ulimits import limit_hint

if TYPE_CHECKING:
    from .spares import Spare

logger = logging.getLogger("aengine.workers")

DEFAULT_TARGET = str(target_of(WORKERS, "default"))
"""What loads the model unless the setting ``worker`` names something else."""
_ENTRY = PACKAGE_FOLDER / "workers" / "entry.py"
_STDERR_TAIL = 4096  # bytes of a dead worker's stderr that its error shows


class WorkerProcess:
    """A worker process. ``on_death`` is called on the loop, once, with its cause, unless `kill` or `close` came first.

    ``channel``: made by ``HostChannel.create`` (in a thread: it takes milliseconds), from now on this object's.
    ``on_frames`` and ``on_death`` are methods, held weakly: the watch thread and the loop hold this object, and may not
    keep an executor alive to which no other reference is left.
    """

    def __init__(
        self,
        config: EngineConfig,
        rank: int,
        channel: HostChannel,
        loop: asyncio.AbstractEventLoop,
        on_frames: Callable[[WorkerProcess], None],
        on_death: Callable[[WorkerProcess, WorkerDiedError], None],
        target: str,
        shared_fds: tuple[int, ...] = (),
    ) -> None:
        """``target``: the ``module:function`` that loads the model there; ``shared_fds``: descriptors that it inherits,
        which stay the caller's.

        Raises EngineError when there is no Python to run, or no thread or descriptor left.
        """
        self.rank = rank
        self.pid: int | None = None  # None before the process is started
        self.clock_offset = 0.0  # seconds between the host's clock and the worker's; 0: both are on one machine
        self.channel = channel
        self._shared_fds = shared_fds
        self._host_pid = os.getpid()
        self._loop = loop
        self._on_frames = WeakMethod(on_frames)
        self._on_death = WeakMethod(on_death)
        self._process: subprocess.Popen[bytes] | None = None
        self._ended = threading.Event()  # set when the watch thread has reaped the process, or could not start it
        # the exit code, for the loop; None: the process could not be started
        self._exit: asyncio.Future[int | None] = loop.create_future()
        self._lock = threading.Lock()  # guards _process and _killed: kill() may come from any thread
        self._killed = False
        self._closed = False
        self._death_read = self._death_pipe = self._stderr = -1
        try:
            self._death_read, self._death_pipe = os.pipe()
            self._stderr = os.memfd_create(f"aengine-worker-{rank}-stderr", os.MFD_CLOEXEC)
            fcntl.fcntl(self._stderr, fcntl.F_SETFL, os.O_APPEND)  # entry.py may truncate the file
            channel.open(loop, self._readable)
            work = (self._command(config, target), config, worker_environment())
            threading.Thread(target=self._watch, args=work, name=f"aengine-worker-{rank}", daemon=True).start()
        except BaseException as error:
            self._close_fd("_death_read")
            self.close()
            if isinstance(error, OSError | RuntimeError):
                raise EngineError(f"worker {rank} can't be started: {error}{limit_hint(str(error))}") from error
            raise

    def _command(self, config: EngineConfig, target: str) -> list[str]:
        """Return the child's argv: with -P and an own file, nothing in its working directory can shadow a module."""
        package_parent = str(PACKAGE_FOLDER.parent)
        search_path = [package_parent, *(folder for folder in sys.path if os.path.isabs(folder))]
        return [
            interpreter(),
            "-P",
            "-Xfaulthandler",
            str(_ENTRY),
            str(self._host_pid),
            str(self._death_read),
            str(self.rank),
            str(config.worker_spin_us),
            self.channel.description,
            target,
            os.pathsep.join(search_path),
        ]

    # -- the watch thread

    def _watch(self, command: list[str], config: EngineConfig, environment: dict[str, str]) -> None:
        code, error = None, None
        try:
            spares = config.spare_workers
            spare = spares.take(environment) if spares and DEFAULT_TARGET in command else None
            process = self._spawn(command, environment | thread_environment(config), spare)
            if process is not None:
                code = process.wait()
        except Exception as caught:
            error = caught
        self._ended.set()
        try:
            self._loop.call_soon_threadsafe(self._reaped, code, error)
        except RuntimeError:  # the loop was closed
            pass

    def _spawn(
        self, command: list[str], environment: dict[str, str], spare: Spare | None
    ) -> subprocess.Popen[bytes] | None:
        """Start the process, or have a spare be it; None when it was killed before it was started."""
        try:
            with self._lock:
                if self._killed:
                    return None
                fds = (*self.channel.inherit_fds, self._death_read, *self._shared_fds)
                argv, folder = command[command.index(str(_ENTRY)) + 1 :], _working_folder()
                if spare is not None and spare.begin(argv, environment, folder, [self._stderr, *fds]):
                    self._process, spare = spare.process, None
                else:
                    self._process = subprocess.Popen(
                        command,
                        cwd=folder,
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=self._stderr,
                        stderr=self._stderr,
                        pass_fds=fds,
                        start_new_session=True,  # a Ctrl-C in the host's terminal is the host's to handle
                    )
                assert self._process is not None
                self.pid = self._process.pid
                try:
                    self.channel.offer()  # the process exists now, and will unlink the name
                except BaseException:
                    self._process.kill()
                    self._process.wait()
                    raise
                return self._process
        finally:
            if spare is not None:
                spare.end()
            self._close_fd("_death_read")

    # -- the loop thread

    def _readable(self) -> None:
        on_frames = self._on_frames()
        if on_frames is not None:
            on_frames(self)

    def _reaped(self, code: int | None, error: Exception | None) -> None:
        if not self._exit.done():
            self._exit.set_result(code)
        on_death = self._on_death()
        if on_death is not None and not self._killed and not self._closed:
            on_death(self, self._explain(code, error))

    def _explain(self, code: int | None, error: Exception | None) -> WorkerDiedError:
        if code is None:
            hint = limit_hint(str(error))
            died = WorkerDiedError(f"worker {self.rank} could not be started: {error}{hint}", rank=self.rank)
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
        """Return the last of what the worker wrote to stdout and stderr; "" after `close`."""
        if self._closed:
            return ""
        size = os.fstat(self._stderr).st_size
        data = os.pread(self._stderr, _STDERR_TAIL, max(0, size - _STDERR_TAIL))
        return data.decode(errors="replace").strip()

    def resident_bytes(self) -> int:
        """Return the process' resident memory; 0 when it has ended, or is not started."""
        if self.pid is None or self._ended.is_set():
            return 0
        try:
            statm = os.open(f"/proc/{self.pid}/statm", os.O_RDONLY)
        except OSError:
            return 0
        try:
            return int(os.pread(statm, 200, 0).split()[1]) * os.sysconf("SC_PAGE_SIZE")
        except (OSError, IndexError):  # the process has just ended
            return 0
        finally:
            os.close(statm)

    async def wait(self, timeout: float | None) -> bool:
        """Wait until the process has ended, at most ``timeout`` seconds. Returns whether it has."""
        if not self._exit.done():
            await asyncio.wait([self._exit], timeout=timeout)
        return self._ended.is_set()

    def kill(self) -> None:
        """Send SIGKILL. Immediate, idempotent, from any thread and state; the watch thread reaps the child.

        Does nothing in a fork of the host: the worker is not the fork's.
        """
        if os.getpid() != self._host_pid:
            return
        with self._lock:
            self._killed = True
            if self._process is not None and not self._ended.is_set():
                self._process.kill()

    def close(self) -> None:
        """Release everything of the host's, once the process has ended or was killed. Idempotent.

        On the loop's thread, or when the loop does not run.
        """
        if self._closed:
            return
        self._closed = True
        self.channel.close()
        self._close_fd("_death_pipe")
        self._close_fd("_stderr")

    def _close_fd(self, name: str) -> None:
        fd = getattr(self, name)
        if fd >= 0:
            setattr(self, name, -1)
            os.close(fd)


def _working_folder() -> str:
    """Return the host's, or "/" if it is gone, as a release's may be: without any, oneMKL does not find torch."""
    try:
        return os.getcwd()
    except FileNotFoundError:
        return "/"


def interpreter() -> str:
    """Return a Python of the host's own installation: sys.executable, unless the host is a program that embeds
    Python."""
    if os.path.basename(sys.executable or "").startswith("python"):
        return sys.executable
    for prefix in (sys.exec_prefix, sys.base_exec_prefix):
        for name in ("python{}.{}".format(*sys.version_info), "python3", "python"):
            path = os.path.join(prefix, "bin", name)
            if os.access(path, os.X_OK):
                return path
    raise EngineError(
        f"workers need a Python interpreter: sys.executable is {sys.executable!r}, and there is none in "
        f"{sys.exec_prefix}/bin; install one there, or set sys.executable to one"
    )
