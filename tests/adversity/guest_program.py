"""A host that looks at itself before, while and after it has an engine, and tells on stdout what has changed:

    python guest_program.py LOOP

LOOP: "asyncio" or "uvloop". The answer is a line of JSON at each stage: its name,
and each thing that is not as it was before aengine was imported, as [before, after].
"""

from __future__ import annotations

import asyncio
import atexit
import builtins
import codecs
import concurrent.futures
import contextvars
import copyreg
import ctypes
import decimal
import faulthandler
import fcntl
import gc
import io
import itertools
import json
import locale
import logging
import multiprocessing
import os
import random
import re
import resource
import selectors
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
import threading
import time
import tracemalloc
import warnings
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

sys.path.append(str(Path(__file__).parents[1] / "workers"))
(loop_kind,) = sys.argv[1:]
concurrent.futures.ThreadPoolExecutor  # noqa: B018  # this module makes its names when they are asked for

PATCHABLE = (
    asyncio, atexit, builtins, codecs, concurrent.futures, copyreg, decimal, gc, io, json, locale, logging, os, random,
    re, selectors, signal, socket, ssl, subprocess, sys, tempfile, threading, time, warnings, weakref,
)  # fmt: skip
TIMERS = (signal.ITIMER_REAL, signal.ITIMER_VIRTUAL, signal.ITIMER_PROF)
PRCTL = {"pdeathsig": 2, "dumpable": 3, "keepcaps": 7, "timerslack": 30, "subreaper": 37, "thp": 42}
LIMITS = [name for name in dir(resource) if name.startswith("RLIMIT_")]


def functions_of(module: Any) -> dict[str, int]:
    """What could be replaced by another of the same name."""
    return {name: id(value) for name, value in vars(module).items() if callable(value) and not name.startswith("_")}


def handler(number: int) -> str:
    return repr(signal.getsignal(number)).partition(" main_task=")[0]  # asyncio's own names the line it is at


def umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def native_environment() -> list[bytes]:
    """As libraries in C see it."""
    entries = ctypes.POINTER(ctypes.c_char_p).in_dll(ctypes.CDLL(None), "environ")
    return sorted(entries[i] or b"" for i in itertools.takewhile(lambda i: entries[i] is not None, itertools.count()))


def prctl(option: int) -> int:
    value = ctypes.c_int(0)
    result = ctypes.CDLL(None).prctl(option, ctypes.byref(value), 0, 0, 0)
    return value.value if option in (2, 37) else result


def loggers() -> dict[str, Any]:
    """Those that differ from one that was only asked for."""
    found = {}
    for name, logger in [("root", logging.getLogger()), *logging.root.manager.loggerDict.items()]:
        if isinstance(logger, logging.Logger):
            state = (logger.level, list(map(repr, logger.handlers)), logger.propagate, logger.disabled, logger.filters)
            if name == "root" or state != (0, [], True, False, []):
                found[name] = repr(state)
    return found


def descriptors() -> dict[str, int]:
    kinds: Counter[str] = Counter()
    for fd in os.listdir("/proc/self/fd"):
        try:
            kinds[re.sub(r"\d+|/proc/.*", "", os.readlink(f"/proc/self/fd/{fd}"))] += 1
        except FileNotFoundError:  # of the listing itself
            pass
    return dict(kinds)


def switches() -> dict[str, Callable[[], Any]]:
    """What a library could change about a process, and how it is now."""
    return {
        "signal handlers": lambda: {n: handler(n) for n in sorted(signal.valid_signals())},
        "signal mask": lambda: sorted(signal.pthread_sigmask(signal.SIG_BLOCK, ())),
        "wakeup descriptor": lambda: (signal.set_wakeup_fd(fd := signal.set_wakeup_fd(-1)), fd)[1] >= 0,
        "interval timers": lambda: [signal.getitimer(timer) for timer in TIMERS],
        "faulthandler": faulthandler.is_enabled,
        "loop policy": lambda: repr(vars(asyncio.events)["_event_loop_policy"]),
        "start method": lambda: repr(multiprocessing.get_start_method(allow_none=True)),
        "environment": lambda: dict(os.environ),
        "native environment": native_environment,
        "loggers": loggers,
        "logging": lambda: [repr(logging.getLoggerClass()), repr(logging.getLogRecordFactory())],
        "disabled levels": lambda: logging.root.manager.disable,
        "captured warnings": lambda: repr(logging._warnings_showwarning),  # type: ignore[attr-defined]
        "warning filters": lambda: list(map(repr, warnings.filters)),
        "resource limits": lambda: {name: resource.getrlimit(getattr(resource, name)) for name in LIMITS},
        "priority": lambda: [os.getpriority(os.PRIO_PROCESS, 0), os.sched_getscheduler(0)],
        "affinity": lambda: sorted(os.sched_getaffinity(0)),
        "prctl": lambda: {name: prctl(option) for name, option in PRCTL.items()},
        "name": lambda: [Path(f"/proc/self/{name}").read_text() for name in ("comm", "cmdline", "oom_score_adj")],
        "gc": lambda: [gc.get_threshold(), gc.isenabled(), gc.get_freeze_count(), gc.get_debug()],
        "gc callbacks": lambda: list(map(repr, gc.callbacks)),
        "interpreter": lambda: [
            sys.getswitchinterval(), sys.getrecursionlimit(), sys.get_int_max_str_digits(), sys.dont_write_bytecode,
            sys.get_coroutine_origin_tracking_depth(), threading.stack_size(), tracemalloc.is_tracing(),
        ],  # fmt: skip
        "hooks": lambda: [
            *map(repr, (sys.excepthook, sys.unraisablehook, sys.displayhook, sys.breakpointhook, threading.excepthook)),
            *map(repr, (sys.gettrace(), sys.getprofile(), threading.gettrace(), threading.getprofile())),
        ],  # fmt: skip
        "streams": lambda: [id(s) for s in (sys.stdin, sys.stdout, sys.stderr)],
        "flags of streams": lambda: [fcntl.fcntl(fd, fcntl.F_GETFL) for fd in (0, 1, 2)],
        "sys.path": lambda: list(sys.path),
        "finders": lambda: [list(map(repr, sys.meta_path)), list(map(repr, sys.path_hooks))],
        "functions": lambda: {m.__name__: functions_of(m) for m in PATCHABLE},
        "copyreg": lambda: sorted(map(repr, copyreg.dispatch_table)),
        "directory": os.getcwd,
        "umask": umask,
        "random state": lambda: hash(random.getstate()),
        "locale": lambda: locale.setlocale(locale.LC_ALL, None),
        "time zone": lambda: [*time.tzname, time.timezone],
        "decimal": lambda: [repr(decimal.getcontext()), repr(decimal.DefaultContext)],
        "denormals": lambda: sys.float_info.min / 2 > 0,
        "socket timeout": socket.getdefaulttimeout,
        "temporary folder": lambda: tempfile.tempdir,
        "context variables": lambda: sorted(var.name for var in contextvars.copy_context()),
        "calls at exit": atexit._ncallbacks,
        "loop": of_loop,
    }  # fmt: skip


def of_loop() -> Any:
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return None
    settings = [loop.get_debug(), loop.slow_callback_duration if loop_kind == "asyncio" else 0]
    hooks = [loop.get_task_factory(), loop.get_exception_handler(), getattr(loop, "_default_executor", None)]
    return [*settings, *map(repr, hooks), *map(repr, sys.get_asyncgen_hooks())]


def possessions() -> dict[str, Any]:
    """What an engine needs while it runs, and gives back."""
    found: dict[str, Any] = {
        "threads": sorted(thread.name for thread in threading.enumerate()),
        "native threads": len(os.listdir("/proc/self/task")) - threading.active_count(),
        "children": [child.pid for child in psutil.Process().children(recursive=True)],
        "descriptors": descriptors(),
        "names in /dev/shm": [name for name in os.listdir("/dev/shm") if f"-{os.getpid()}-" in name],
    }
    try:
        loop = asyncio.get_running_loop()
    except RuntimeError:
        return found | {"tasks": None, "readers": None}
    selector = getattr(loop, "_selector", None)
    return found | {
        "tasks": sorted(task.get_name() for task in asyncio.all_tasks()),
        "readers": None if selector is None else len(selector.get_map()),
    }


def look() -> dict[str, Any]:
    return {name: get() for name, get in switches().items()} | possessions()


async def calm() -> None:
    """Until threads and processes that have been told to end have done so; five seconds at most."""
    gc.collect()
    same, last = 0, possessions()
    for _ in range(250):
        await asyncio.sleep(0.02)
        now = possessions()
        same = same + 1 if now == last else 0
        if same == 5:
            return
        last = now


def differences(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name in before:
        a, b = before[name], after[name]
        if a == b:
            continue
        if isinstance(a, dict) and isinstance(b, dict):
            a, b = ({k: v for k, v in x.items() if (k, v) not in y.items()} for x, y in ((a, b), (b, a)))
        found[name] = [a, b]
    return found


def tell(stage: str, before: dict[str, Any], after: dict[str, Any]) -> None:
    print(json.dumps([stage, differences(before, after)], default=repr), flush=True)


async def use(engine: Any) -> None:
    """Everything that a caller does, in short."""
    from aengine import SamplingParams, StructuredOutput

    short = SamplingParams(max_tokens=5)
    await engine.generate("Hello", short)
    await engine.generate("Hello " * 300, short)
    async for _ in engine.stream([1, 2, 3], short):
        break
    shapes: list[dict[str, Any]] = [
        {"regex": "[ab]{3}"},
        {"json_schema": {"type": "object"}},
        {"choice": ["yes", "no"]},
    ]
    for wanted in shapes:
        await engine.generate("Hello", short.replace(structured_output=StructuredOutput(**wanted)))
    await engine.generate("Hello", short, output_type=list[int])
    await engine.chat([{"role": "user", "content": "Hello"}], short)
    tool = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer"}}}}
    await engine.chat([{"role": "user", "content": "Hello"}], short, tools=[tool])
    try:
        await engine.generate("Hello", short, output_type=print)
    except ValueError:
        pass


def make() -> Any:
    """The worker has no model, and does as the grammars say."""
    from aengine import AsyncLLM
    from aengine.engine.executor import ProcessExecutor

    class FakeLLM(AsyncLLM):
        def _make_executor(self, config: Any) -> ProcessExecutor:
            return ProcessExecutor(config.replace(worker="slow_runner:load_obedient_model"))

    return FakeLLM("smollm2-135m")


async def main() -> None:
    look()
    before = look()
    import aengine  # noqa: F401

    tell("imported", before, look())
    engine = make()
    tell("made", before, look())
    await engine.start()
    tell("started", before, look())
    await use(engine)
    await calm()
    tell("used", before, look())
    await engine.aclose()
    await calm()
    tell("closed", before, look())
    once = look()
    await engine.start()
    await use(engine)
    await engine.aclose()
    await calm()
    tell("closed again", once, look())


if __name__ == "__main__":
    if loop_kind == "uvloop":
        import uvloop
    new_loop = uvloop.new_event_loop if loop_kind == "uvloop" else None
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(asyncio.sleep(0))  # what a loop leaves behind is not ours
    before = look()
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(main())
    gc.collect()
    tell("left", before, look())
