"""Malformed frames and messages: as a broken worker, a stray pointer or a third party might leave them in the rings."""

from __future__ import annotations

import asyncio
import logging
import math
import random
import struct
import time
import traceback
from array import array
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import msgpack

from aengine import AEngineError, EngineConfig
from aengine.engine.executor import ProcessExecutor
from aengine.ipc.layout import CONTROL_BYTES, HEAD, NOTHING_WANTED, TAIL, WANTED, WHOLE
from aengine.ipc.messages import (
    LOG_TEXTS,
    GrammarOutput,
    Kind,
    LogprobColumns,
    MessageError,
    ModelRunnerOutput,
    NewRequest,
    RowError,
    SchedulerOutput,
    float32,
    int32,
    pack,
    unpack,
)
from aengine.ipc.ring import Assembler, Consumer, FrameError, Producer
from aengine.workers.host.answers import PendingCall
from aengine.workers.host.handshake import Handshake
from aengine.workers.rank import Rank

SLOW = 2.0  # seconds of CPU time that one frame may take


@dataclass
class Report:
    """What came of it: how often what, and everything that should not have been."""

    outcomes: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)  # of findings, by place
    slowest: float = 0.0
    slowest_what: str = ""

    def found(self, what: str, error: BaseException | None = None) -> None:
        """Findings that come from the same line are one; the first is shown."""
        trace, place = "", what[:30]
        if error is not None:
            trace = "".join(traceback.format_exception(error, limit=-6))[-3000:]
            frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "aengine" in frame.filename]
            place = f"{type(error).__name__} {frames[-1].filename}:{frames[-1].lineno}" if frames else what[:30]
        self.counts[place] += 1
        if self.counts[place] == 1:
            self.findings.append(f"{what}\n{trace}")

    def took(self, seconds: float, what: str) -> None:
        if seconds > self.slowest:
            self.slowest, self.slowest_what = seconds, what[:200]


# -- valid messages


def ids(rng: random.Random, most: int = 6) -> array[int]:
    return int32(rng.randrange(50_000) for _ in range(rng.randrange(most)))


def new_request(rng: random.Random) -> NewRequest:
    tokens = int32(rng.randrange(49_152) for _ in range(rng.randrange(1, 9)))
    return NewRequest(
        rng.randrange(4), tokens, rng.randrange(1, len(tokens) + 1), 0, ids(rng), seed=rng.getrandbits(62)
    )


def scheduler_output(rng: random.Random) -> SchedulerOutput:
    new = [new_request(rng) for _ in range(rng.randrange(3))]
    blocks, rows = ids(rng), ids(rng)
    columns = {"block_rows": blocks, "block_ids": blocks, "req_idx": rows, "num_scheduled_tokens": rows}
    return SchedulerOutput(rng.randrange(9), removed=ids(rng), new_requests=new, **columns)


def model_runner_output(rng: random.Random) -> ModelRunnerOutput:
    tokens = ids(rng)
    columns = None
    if rng.random() < 0.5:
        counts = int32(rng.randrange(3) for _ in tokens)
        values = float32(rng.uniform(-9, 0) for _ in range(sum(counts)))
        sampled = float32(rng.uniform(-9, 0) for _ in tokens)
        columns = LogprobColumns(int32(range(len(tokens))), sampled, counts, int32(range(len(values))), values)
    errors = [RowError(rng.randrange(3), "InvalidRequestError", "a message") for _ in range(rng.randrange(2))]
    return ModelRunnerOutput(rng.randrange(9), tokens, columns, errors, rng.uniform(0, 1e6))


def offer(rng: random.Random) -> dict[str, Any]:
    names = ("num_blocks", "block_size", "max_model_len", "max_num_batched_tokens", "vocab_size")
    return {name: rng.randrange(1, 50_000) for name in names} | {"dtype": "float32"}


def ready(rng: random.Random) -> dict[str, Any]:
    return {"pid": rng.randrange(1, 50_000), "device": "cpu", "seconds": 0.5}


def report(rng: random.Random) -> dict[str, str]:
    kind = rng.choice(["ModelLoadError", "InternalError", "ValueError"])
    return {"type": kind, "message": "it failed", "traceback": "Traceback ..."}


def log(rng: random.Random) -> dict[str, Any]:
    level = rng.choice([logging.DEBUG, logging.INFO])
    name = rng.choice(["aengine.runner", "aengine", "py.warnings", "torch", "root", ""])
    text = rng.choice(["it runs on the CPU", "%s %d", ""])
    at = {"path": "/a/b.py", "line": rng.randrange(999), "function": "f", "thread": "MainThread"}
    return {"level": level, "name": name, "text": text, "created": 1.7e9 + rng.random(), **at}


VALID: dict[Kind, Callable[[random.Random], Any]] = {
    Kind.LOAD: lambda rng: {
        "config": EngineConfig.create("fake", {}).to_wire(),
        "source": {},
        "rank": 0,
        "world_size": 1,
    },
    Kind.STEP: scheduler_output,
    Kind.GRAMMAR: lambda rng: GrammarOutput(rng.randrange(9), ids(rng), rng.randbytes(8) if rng.random() < 0.5 else 16),
    Kind.CALL: lambda rng: ["ping", True],
    Kind.REVOKED: lambda rng: rng.randrange(3),
    Kind.PROGRESS: lambda rng: {"stage": "weights", "done": rng.randrange(9), "total": 9, "unit": "bytes"},
    Kind.PROFILED: offer,
    Kind.READY: ready,
    Kind.OUTPUT: model_runner_output,
    Kind.REPLY: lambda rng: (
        {"error": report(rng)} if rng.random() < 0.3 else {"value": rng.choice([None, 1, {"a": [2]}])}
    ),
    Kind.ERROR: report,
    Kind.LOG: log,
}
FROM_WORKERS = tuple(kind for kind in VALID if kind >= Kind.PROGRESS)


# -- and what becomes of them


_FULL = b"\xff\xff\xff\xff"
BOMBS = [  # lengths of GB, depths of thousands, and what msgpack does not have
    *(code + _FULL for code in (b"\xdd", b"\xdf", b"\xc6", b"\xdb", b"\xc9")),
    *(code + b"\xff\xff" for code in (b"\xdc", b"\xde", b"\xc5", b"\xda")),
    *(b"\xc1", b"\xd8\x05" + bytes(16), b"\xc7\x0c\xff" + _FULL * 3, b"\xa1\xff", b""),
    *(b"\x91" * 3000, b"\x81" * 3000, (b"\xdd" + struct.pack(">I", 60_000)) * 900 + bytes(60_000)),
]
STRANGE: list[Any] = [
    *(None, True, False, 0, -1, 1, 2**31, 2**64 - 1, -(2**63), 0.5, math.nan, math.inf, "", "a", "\x00", "x" * 5000),
    *(b"", b"\x01", b"\x01\x02\x03", b"\xff" * 4, b"\xff" * 8, bytes(4000), [], [None], [[]], {}, {"a": 1}, {1: 2}),
    *([1] * 50, ["error"], {"error": None}, {"error": {}}, {"value": 1, "error": 5}),
    *(msgpack.ExtType(5, b"x"), msgpack.Timestamp(1, 2)),
]


def valid_payload(rng: random.Random, kinds: tuple[Kind, ...] = tuple(VALID)) -> tuple[Kind, bytes]:
    kind = rng.choice(kinds)
    return kind, pack(VALID[kind](rng))


def mutated(rng: random.Random, payload: bytes) -> bytes:
    """Another payload: bits, bytes and lengths changed, cut, doubled, or a part of its content replaced."""
    how = rng.randrange(8)
    if how <= 3:
        return _with_strange_part(rng, payload)
    data = bytearray(payload)
    if how == 4:
        for _ in range(rng.randrange(1, 4)):
            if data:
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif how == 5:
        return bytes(data[: rng.randrange(len(data) + 1)])
    elif how == 6:
        at = rng.randrange(len(data) + 1)
        data[at : at + rng.randrange(6)] = rng.choice(BOMBS)
    else:
        return rng.choice(
            [rng.randbytes(rng.randrange(60)), bytes(data) * 2, bytes(data) + bytes(3000), rng.choice(BOMBS)]
        )
    return bytes(data)


def _with_strange_part(rng: random.Random, payload: bytes) -> bytes:
    try:
        whole = [msgpack.unpackb(payload, strict_map_key=False)]
    except ValueError:
        return rng.choice(BOMBS)
    part: Any = whole
    while True:  # down to some member
        keys = list(range(len(part))) if isinstance(part, list) else list(part)
        key = rng.choice(keys)
        if isinstance(part[key], list | dict) and part[key] and rng.random() < 0.7:
            part = part[key]
            continue
        break
    how = rng.randrange(4)
    if how == 0 and part is not whole:
        del part[key]
    elif how == 1 and isinstance(part, list) and part is not whole:
        part.insert(key, rng.choice(STRANGE))
    elif how == 1 and isinstance(part, dict):
        part[rng.choice(["error", "value", 5, "stage", "x"])] = rng.choice(STRANGE)
    else:
        part[key] = rng.choice(STRANGE)
    return bytes(msgpack.packb(whole[0], strict_types=False))


# -- who gets them


def unpacking(rng: random.Random, to: Report) -> None:
    """`unpack`: what was sent, or a MessageError of bounded length."""
    kind, payload = valid_payload(rng)
    if rng.random() < 0.1:
        kind = rng.choice(list(Kind))
    payload = mutated(rng, payload)
    begun = time.thread_time()
    try:
        message = unpack(kind, payload)
    except MessageError as error:
        to.outcomes["unpack: MessageError"] += 1
        if len(str(error)) > 1000:
            to.found(f"unpack: an error of {len(str(error))} characters for {payload[:80]!r}")
    except BaseException as error:
        to.found(f"unpack: {kind.name} {payload[:200]!r}", error)
    else:
        to.outcomes["unpack: accepted"] += 1
        fault = _fault_of(kind, message)
        if fault:
            to.found(f"unpack: {kind.name} {payload[:200]!r} gave {fault}")
    to.took(time.thread_time() - begun, f"unpack {kind.name} {payload[:60]!r}")


def _fault_of(kind: Kind, message: Any) -> str:
    """What is wrong with a message that was accepted; "" if nothing is."""
    try:
        return _fault_in(kind, message)
    except Exception as error:
        return f"{message!r}, which has {error!r}"


def _fault_in(kind: Kind, message: Any) -> str:
    if kind is Kind.OUTPUT:
        columns = message.logprobs
        right = type(message.step_id) is int and message.token_ids.typecode == "i"
        right = right and all(
            type(e.batch_idx) is int and type(e.type) is type(e.message) is str for e in message.errors
        )
        if columns is not None:
            right = right and min(columns.counts, default=0) >= 0 and sum(columns.counts) == len(columns.token_ids)
        return "" if right else repr(message)
    if kind is Kind.READY:
        return "" if type(message["pid"]) is int else repr(message)
    if kind is Kind.PROFILED:
        names = ("num_blocks", "block_size", "max_model_len", "max_num_batched_tokens", "vocab_size")
        return "" if all(type(message[name]) is int and message[name] >= 1 for name in names) else repr(message)
    if kind is Kind.PROGRESS:
        right = type(message["stage"]) is str and type(message.get("done", 0)) is type(message.get("total", 0)) is int
        return "" if right else repr(message)
    if kind is Kind.LOG:
        right = type(message["level"]) is type(message["line"]) is int and math.isfinite(message["created"])
        right = right and all(type(message[name]) is str for name in LOG_TEXTS)
        return "" if right else repr(message)
    return ""


def ringing(rng: random.Random, to: Report) -> None:
    """The consumer's end of a ring that somebody has scribbled on: whole frames, or a FrameError."""
    capacity = rng.choice([256, 1024, 4096])
    region = memoryview(bytearray(CONTROL_BYTES + capacity))
    words = region[:CONTROL_BYTES].cast("Q")
    words[WANTED] = NOTHING_WANTED
    producer, consumer = Producer(region, lambda: None), Consumer(region, lambda: None)
    assembler = Assembler(1 << 16)
    for _ in range(rng.randrange(4)):  # not at the ring's beginning
        if producer.has_room(96):
            producer.write(18, 1, WHOLE, b"x" * 50)
            if rng.random() < 0.8:
                consumer.refresh()
                consumer.read()
    while producer.has_room(160) and rng.random() < 0.8:
        _, payload = valid_payload(rng)
        producer.write(
            rng.randrange(256), rng.getrandbits(63), rng.choice([WHOLE, WHOLE, 0, 1, 2, 4, 5, 7, 8]), payload[:100]
        )
    for _ in range(rng.randrange(4)):
        _scribble(rng, region, words, capacity)
    try:
        num_reads = 0
        while consumer.refresh():
            while (raw := consumer.read()) is not None:
                assembler.add(*raw)
                consumer.producer_waits()
                num_reads += 1
                if num_reads > capacity:
                    to.found(f"ring: {num_reads} frames out of {capacity} bytes")
                    return
        to.outcomes["ring: read"] += 1
    except FrameError:
        to.outcomes["ring: FrameError"] += 1
    except BaseException as error:
        to.found("ring", error)
    try:
        producer.has_room(64)
    except FrameError:
        to.outcomes["ring: FrameError of the producer"] += 1


def _scribble(rng: random.Random, region: memoryview, words: memoryview, capacity: int) -> None:
    how = rng.randrange(5)
    if how == 0:
        region[rng.randrange(len(region))] ^= 1 << rng.randrange(8)
    elif how == 1:
        words[rng.choice([HEAD, TAIL, WANTED])] = rng.choice(
            [rng.getrandbits(64), rng.randrange(0, 4 * capacity, 32), 2**64 - 32]
        )
    elif how == 2:  # some frame's length, of GB
        at = CONTROL_BYTES + rng.randrange(0, capacity, 32)
        region[at + 24 : at + 32] = rng.choice([2**32, 2**40, 2**63, 2**64 - 1, capacity, capacity * 2]).to_bytes(
            8, "little"
        )
    elif how == 3:
        at = CONTROL_BYTES + rng.randrange(capacity - 32)
        region[at : at + 32] = rng.randbytes(32)
    else:  # a frame of another place
        a, b = (CONTROL_BYTES + rng.randrange(0, capacity, 32) for _ in range(2))
        region[a : a + 32] = region[b : b + 32]


class _Stub:
    """Stands for a worker process whose ring holds one frame."""

    def __init__(self, frame: Any) -> None:
        self.rank, self.pid = 0, 1
        self.channel = SimpleNamespace(drain=lambda: [frame], unlink=lambda: None)

    def kill(self) -> None:
        pass

    close = kill

    def stderr_tail(self) -> str:
        return ""


async def executing(rng: random.Random, to: Report) -> None:
    """A `ProcessExecutor` with everything under way: the frame is taken, or all who wait get one typed error."""
    from aengine.ipc.channel import Frame

    kind, payload = valid_payload(rng, FROM_WORKERS)
    if rng.random() < 0.9:
        payload = mutated(rng, payload)
    number = rng.choice([kind, kind, kind, kind, *Kind, rng.randrange(256)])
    executor = ProcessExecutor(EngineConfig.create("fake", {}))
    loop = asyncio.get_running_loop()
    stub: Any = _Stub(Frame(number, rng.choice([3, 3, 3, 0, 2**63]), payload))
    call = PendingCall(3, 1, rng.choice(["", "method"]))
    waiting = [loop.create_future(), loop.create_future(), call.replies, loop.create_future()]
    executor.workers._workers = [stub]
    executor._handshake = Handshake([Rank()], lambda progress: None)
    executor._handshake._readies, executor._handshake._offers = [waiting[0]], [waiting[3]]
    executor._answers.steps, executor._answers.calls = {3: waiting[1]}, {3: call}
    begun = time.thread_time()
    what = f"executor: kind {number}, {payload[:200]!r}"
    try:
        executor._on_frames(stub)
    except BaseException as error:
        to.found(what, error)
    failure = executor.workers.failure
    errors = [future.exception() for future in waiting if future.done()]
    if failure is None:
        to.outcomes["executor: taken"] += 1
    else:
        to.outcomes[f"executor: {type(failure).__name__}"] += 1
        if not all(future.done() for future in waiting):
            to.found(f"executor: somebody waits for ever; {what}")
        if len(str(failure)) > 20_000:
            to.found(f"{what}: an error of {len(str(failure))} characters")
    if not all(error is None or isinstance(error, AEngineError) for error in [failure, *errors]):
        to.found(f"{what}: {failure!r} {errors!r}")
    for taken, future in ((Kind.READY, waiting[0]), (Kind.PROFILED, waiting[3])):
        if future.done() and future.exception() is None and _fault_of(taken, future.result()):
            to.found(f"{what}: {taken.name} with {future.result()!r}")
    executor._released = True
    to.took(time.thread_time() - begun, what)


async def fuzz_frames(count: int, seed: int) -> Report:
    """``count`` of them to each, by turns."""
    rng, result = random.Random(seed), Report()
    for i in range(count):
        unpacking(rng, result)
        ringing(rng, result)
        await executing(rng, result)
        if i % 100 == 0:
            await asyncio.sleep(0)
    if result.slowest > SLOW:
        result.found(f"{result.slowest:.1f} s for {result.slowest_what}")
    return result
