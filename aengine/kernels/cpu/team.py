"""The threads that run a tape: those of the process, which wait for each other op by op.

Each op of a tape is divided into chunks, which threads claim: first a run each, which a core reads faster than as many
chunks far apart, then one by one. An op is done when all of its chunks are, and the next one begins then. Nobody waits
for a thread that has claimed nothing: one that the system has put aside, as another process has its core, or that still
sleeps, is not missed. Threads wait by spinning some microseconds, then asleep. They are pinned to nothing.

A team's memory, int64 words, each in a cache line of its own where several threads write it:

    0  gate       number of threads within the tape; the bit `_OPEN` while it is being run
    8  epoch      number of runs so far; threads sleep on its lower half
    16 sleepers   threads that may sleep on the epoch
    24 tape, number of ops, rows, counters, number of threads; -1 ops: threads end
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable
from typing import Any

import numpy as np

from .compiler.emit import I32, I64, POINTER, Function, Module, Value

OP_WORDS = 32
"""Words of an op: the address of its function, the chunks of each block of rows, the rows of a block, the most chunks
or 0, then its arguments from `ARGUMENTS` on."""
ARGUMENTS = 4
COUNTER_WORDS = 16
"""Words of an op's counters: chunks that were claimed, and, a cache line later, chunks that are done."""

_OPEN = 1 << 31
_GATE, _EPOCH, _SLEEPERS, _TAPE, _NUM_OPS, _ROWS, _COUNTERS, _NUM_THREADS = 0, 64, 128, 192, 200, 208, 216, 224
_IN_RUNS = 3, 4  # share of an op's chunks that is claimed in runs
_SPINS_FOR_CHUNKS = 2000  # some 40 us
_SPINS_FOR_RUN = 1000
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_WAIT, _WAKE = 128, 129  # FUTEX_WAIT_PRIVATE, FUTEX_WAKE_PRIVATE
_NAP = 50_000  # nanoseconds


def write_team(module: Module, machine: str) -> None:
    """Write ``team_run(team, timeout)``, which a step calls, and ``team_thread(team, thread, timeout)``, the life of
    another thread. ``timeout``: a timespec of `_NAP`. ``machine``: as of platform.machine()."""
    system_call = _SYS_FUTEX[machine]

    def futex(f: Function, place: Value, op: int, value: Value, timeout: Value) -> None:
        whole = [f.number(I64, system_call), place, f.number(I64, op), f.widened(value, I64), timeout]
        f.call("syscall", I64, *whole, f.number(I64, 0), f.number(I64, 0))

    def pause(f: Function) -> None:
        if machine == "x86_64":
            f.call("llvm.x86.sse2.pause", None)
        else:
            f.call("llvm.aarch64.hint", None, f.number(I32, 1))

    def wait(f: Function, place: Value, is_over: Callable[[Value], Value]) -> None:
        """Spin until the number at a place is what is waited for; after a while sleep between looks at it."""
        spins = f.variable(I64, 0)
        with f.repeat() as over:
            number = f.atomic_load(place)
            f.leave(over, is_over(number))
            pause(f)
            spins.add(f.number(I64, 1))
            with f.when(spins.get() > _SPINS_FOR_CHUNKS):
                futex(f, place, _WAIT, f.narrowed(number, I32), f.timeout)

    with module.function("team_ops", team=POINTER, thread=I64, timeout=POINTER) as f:
        tape, counters = f.load(POINTER, f.team + _TAPE), f.load(POINTER, f.team + _COUNTERS)
        rows, threads = f.load(I64, f.team + _ROWS), f.load(I64, f.team + _NUM_THREADS)
        with f.loop(0, f.load(I64, f.team + _NUM_OPS)) as i:
            op, counter = tape + i * (8 * OP_WORDS), counters + i * (8 * COUNTER_WORDS)
            grain = f.word(op, 2)
            total = (rows + grain - 1) // grain * f.word(op, 1)
            total = f.choose(f.word(op, 3).equals(0), total, f.smaller(total, f.word(op, 3)))
            address = f.word(op, 0)
            done = counter + 64
            run = f.larger(total * _IN_RUNS[0] // (threads * _IN_RUNS[1]), 1)
            with f.repeat() as claimed_all:
                claim = f.fetch_add(counter, 1)
                single = claim - threads
                begin = f.choose(single < 0, claim * run, threads * run + single)
                f.leave(claimed_all, begin >= total)
                count = f.choose(single < 0, run, 1)
                with f.loop(begin, begin + count) as chunk:
                    f.call_at(address, op + 8 * ARGUMENTS, rows, chunk, f.thread)
                f.fetch_add(done, count)
            wait(f, done, total.__le__)

    with module.function("team_run", team=POINTER, timeout=POINTER) as f:
        f.atomic_store(f.number(I64, _OPEN), f.team + _GATE)
        f.fetch_add(f.team + _EPOCH, 1)
        with f.when(f.atomic_load(f.team + _SLEEPERS).differs(0)):
            futex(f, f.team + _EPOCH, _WAKE, f.number(I32, 1 << 30), f.timeout)
        f.call("team_ops", None, f.team, f.number(I64, 0), f.timeout)
        f.fetch_add(f.team + _GATE, -_OPEN)
        wait(f, f.team + _GATE, lambda gate: gate.equals(0))  # nobody may look at what the next run changes

    with module.function("team_thread", team=POINTER, thread=I64, timeout=POINTER) as f:
        last = f.variable(I64, 0)
        with f.repeat() as ended:
            spins = f.variable(I64, 0)
            with f.repeat() as has_come:
                f.leave(has_come, f.atomic_load(f.team + _EPOCH).differs(last.get()))
                pause(f)
                spins.add(f.number(I64, 1))
                with f.when(spins.get() > _SPINS_FOR_RUN):
                    f.fetch_add(f.team + _SLEEPERS, 1)
                    futex(f, f.team + _EPOCH, _WAIT, f.narrowed(last.get(), I32), f.null())
                    f.fetch_add(f.team + _SLEEPERS, -1)
            last.set(f.atomic_load(f.team + _EPOCH))
            f.leave(ended, f.load(I64, f.team + _NUM_OPS) < 0)
            entered = f.variable(I64, 0)
            with f.repeat() as settled:
                gate = f.atomic_load(f.team + _GATE)
                f.leave(settled, (gate & _OPEN).equals(0))
                entered.set(f.widened(f.exchange(f.team + _GATE, gate, gate + 1), I64, signed=False))
                f.leave(settled, entered.get().differs(0))
            with f.when(entered.get().differs(0)):
                f.call("team_ops", None, f.team, f.thread, f.timeout)
                f.fetch_add(f.team + _GATE, -1)


def aligned_words(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """int64 zeros that begin at a cache line."""
    memory = np.zeros(count + 8, np.int64)
    begin = -memory.ctypes.data // 8 % 8
    return memory[begin : begin + count]


class Team:
    """The threads that run tapes; the caller of `run` is one of them."""

    def __init__(self, num_threads: int, run_address: int, thread_address: int) -> None:
        """``run_address``, ``thread_address``: of the functions that `write_team` writes."""
        self.num_threads = num_threads
        self._words = aligned_words(32)
        self._words[28] = num_threads
        self._nap = np.array([0, _NAP], np.int64)
        arguments = ctypes.c_void_p, ctypes.c_void_p
        self._run = ctypes.CFUNCTYPE(None, *arguments)(run_address)
        thread_main = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(thread_address)
        self._own = self._words.ctypes.data, self._nap.ctypes.data
        self._lock = threading.Lock()
        self._threads = [
            threading.Thread(
                target=thread_main, args=(self._own[0], i, self._own[1]), name=f"aengine-cpu-{i}", daemon=True
            )
            for i in range(1, num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def run(self, tape: int, num_ops: int, rows: int, counters: np.ndarray[Any, np.dtype[np.int64]]) -> None:
        """Run the ops at an address over ``rows`` rows, one after another; returns when all are done."""
        with self._lock:
            counters.fill(0)
            self._words[24:28] = tape, num_ops, rows, counters.ctypes.data
            self._run(*self._own)

    def close(self) -> None:
        """End the threads."""
        with self._lock:
            self._words[25] = -1
            self._run(*self._own)
        for thread in self._threads:
            thread.join()
