"""Hands log records of workers to the host's `logging`. The other end: workers/logs.py."""

from __future__ import annotations

import asyncio
import logging
from typing import Any


def level_for_workers() -> int:
    """Return the level from which a new worker sends its log records: the lowest that aengine's loggers here show."""
    names = [name for name in list(logging.root.manager.loggerDict) if name.startswith("aengine.")]
    lowest = min(logging.getLogger(name).getEffectiveLevel() for name in ("aengine", *names))
    return min(max(1, lowest), logging.INFO)  # INFO is always sent, for an application that lowers its level later


def log_for_worker(rank: int, pid: int | None, message: dict[str, Any]) -> None:
    """Log the content of a LOG frame, if the host shows its level. On the loop.

    A record of a logger that is not one of aengine's goes to "aengine.workers." and its name, so that nothing in a
    worker can write to the loggers of the application.
    """
    name = message["name"]
    if name != "aengine" and not name.startswith("aengine."):
        name = f"aengine.workers.{name}"
    logger, level = logging.getLogger(name), message["level"]
    if not logger.isEnabledFor(level):
        return
    try:
        extra = {"worker_rank": rank, "worker_pid": pid}
        at = (message["path"], message["line"])
        record = logger.makeRecord(name, level, *at, message["text"], (), None, message["function"], extra)
        record.created, record.msecs = message["created"], message["created"] % 1 * 1000
        record.process, record.processName = pid, f"aengine worker {rank}"
        record.threadName, record.thread, record.taskName = message["thread"], 0, None
        logger.handle(record)
    except Exception as error:  # raised by a filter or a handler of the application: it is not the worker's fault
        context = {"message": f"a record of aengine's worker {rank} could not be logged", "exception": error}
        asyncio.get_running_loop().call_exception_handler(context)
