"""The worker's log records on their way to the host's `logging`.

    any thread: logging, warnings ──> WorkerLogs.emit ──> queue ──publish()──> LOG frames ──> telemetry/worker_logs.py
                                      rate-limited        main thread only

The ring has one producer, the main thread. A record of the main thread is published at once; one of another thread at
the main thread's next turn, which comes within half a second unless it is busy. Nothing here ever waits for the host:
what finds no room in the ring stays in the queue, and what finds none in the queue is counted and left out.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque

from ..ipc.channel import WorkerChannel
from ..ipc.messages import Kind, pack

BURST = 50
"""Records that may come at once, ..."""
PER_SECOND = 10.0
"""... and how many a second after those."""
MOST_QUEUED = 200
_HEAD, _TAIL = 4000, 4000  # characters kept of both ends of a longer text; a fragment of the smallest ring has 16 KiB


class WorkerLogs(logging.Handler):
    """Forwards records to the host. Made on the thread that publishes; `install` has it take all of the process'."""

    def __init__(self, channel: WorkerChannel) -> None:
        super().__init__()
        self._channel = channel
        self._thread = threading.get_ident()
        self._queue: deque[bytes] = deque()
        self._num_left_out = 0
        self._left_out_since = 0.0
        self._allowance, self._counted = float(BURST), time.monotonic()
        self._is_publishing = False
        self._is_installed = False

    def install(self) -> None:
        """Take the records of all loggers, and the warnings of the module `warnings`."""
        self._is_installed = True
        logging.getLogger().addHandler(self)
        logging.captureWarnings(True)
        self.show_from(logging.INFO)

    def show_from(self, level: int) -> None:
        """Forward records of aengine's own loggers from ``level`` on; those of other loggers from WARNING on."""
        if self._is_installed:
            logging.getLogger("aengine").setLevel(level)

    @property
    def is_pending(self) -> bool:
        """Whether `publish` has something left to do."""
        return bool(self._queue or self._num_left_out)

    def emit(self, record: logging.LogRecord) -> None:
        """Queue it, or count it as left out. From any thread; `logging` holds this handler's lock meanwhile."""
        if len(self._queue) >= MOST_QUEUED or not self._is_allowed():
            if not self._num_left_out:
                self._left_out_since = time.monotonic()
            self._num_left_out += 1
        else:
            try:
                self._queue.append(pack(_message_of(record)))
            except Exception:
                self.handleError(record)
        if threading.get_ident() == self._thread:
            self.publish()
        else:
            self._channel.nudge()

    def publish(self) -> None:
        """Send what there is room for. On the main thread, anywhere: also while it publishes something else."""
        if self._is_publishing:  # a finaliser has logged something while this was publishing
            return
        self._is_publishing = True
        try:
            if self._num_left_out:
                self._report_left_out()
            while self._queue and self._channel.try_publish(Kind.LOG, 0, self._queue[0]):
                self._queue.popleft()
        finally:
            self._is_publishing = False

    def _report_left_out(self) -> None:
        """Log the number of records that were left out, at most once a second."""
        assert self.lock is not None
        with self.lock:
            if self._queue or time.monotonic() - self._left_out_since < 1.0:
                return
            count, self._num_left_out = self._num_left_out, 0
        text = f"{count} more log records of this worker were left out: there were too many at a time"
        record = logging.LogRecord("aengine.workers", logging.WARNING, __file__, 0, text, (), None)
        self._queue.append(pack(_message_of(record)))

    def _is_allowed(self) -> bool:
        """Return whether a token bucket allows another record now."""
        now = time.monotonic()
        self._allowance = min(BURST, self._allowance + (now - self._counted) * PER_SECOND)
        self._counted = now
        if self._allowance < 1.0:
            return False
        self._allowance -= 1.0
        return True


_formatter = logging.Formatter()


def _message_of(record: logging.LogRecord) -> dict[str, str | int | float]:
    """Return the content of a LOG frame. The text has the traceback of the record's exception, if there is one."""
    text = _formatter.format(record)
    if len(text) > _HEAD + _TAIL:
        num_more = len(text) - _HEAD - _TAIL
        text = f"{text[:_HEAD]}\n... ({num_more} characters left out) ...\n{text[-_TAIL:]}"
    message: dict[str, str | int | float] = {
        "level": record.levelno,
        "name": record.name,
        "text": text,
        "created": record.created,
        "path": record.pathname,
        "line": record.lineno,
        "function": record.funcName or "",
        "thread": record.threadName or "",
    }
    # A file name that is not UTF-8 has surrogates, which can't be packed.
    return {
        name: value.encode("utf-8", "backslashreplace").decode() if isinstance(value, str) else value
        for name, value in message.items()
    }
