"""What comes over the rings is data: checked, bounded, never code."""

from __future__ import annotations

from array import array
from typing import Any

import msgpack
import pytest

from aengine.ipc.messages import (
    PLAN_LIMITS,
    DraftColumns,
    GrammarOutput,
    Kind,
    LogprobColumns,
    MessageError,
    ModelRunnerOutput,
    NewRequest,
    ResultColumns,
    RowError,
    SchedulerOutput,
    float32,
    int32,
    pack,
    unpack,
)

OFFER = dict.fromkeys((*PLAN_LIMITS, "block_size", "vocab_size"), 7)
ERROR = {"type": "ValueError", "message": "m", "traceback": "t"}
LOG = {
    "level": 30,
    "name": "aengine.runner",
    "text": "it is dark",
    "created": 1.7e9,
    "path": "/a.py",
    "line": 3,
    "function": "f",
    "thread": "MainThread",
}


def drafted(counts: array[int], token_ids: array[int]) -> SchedulerOutput:
    batch = {"req_idx": int32([1, 2]), "num_scheduled_tokens": int32([1, 3])}
    return SchedulerOutput(3, **batch, drafts=DraftColumns(counts, token_ids, int32([0, 1])))


ALONE = LogprobColumns(int32([0]), float32([-0.5]), int32([0]), int32(), float32())  # of a token without alternatives
COLUMNS = LogprobColumns(int32([1]), float32([-0.5]), int32([2]), int32([3, 4]), float32([-0.5, -1.5]))


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5, 6]), 2, 0, int32([9]), temperature=0)])),
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 1, 0, int32(), extras={"a": [b"x"]})])),
        (Kind.STEP, SchedulerOutput(3, int32([4]), int32([2]), int32([1]))),
        (Kind.STEP, drafted(int32([0, 2]), int32([7, 8]))),
        (Kind.GRAMMAR, GrammarOutput(3, int32([0]), b"\x01\x02\x03\x04")),
        (Kind.GRAMMAR, GrammarOutput(3, int32([0]), 4)),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5, -1]), COLUMNS, [RowError(1, "InvalidRequestError", "nan")])),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5]), ALONE)),
        (Kind.PROFILED, OFFER | {"dtype": "float32"}),
        (Kind.READY, {"pid": 7, "device": "cpu", "seconds": 1.5}),
        (Kind.PROGRESS, {"stage": "weights"}),
        (Kind.PROGRESS, {"stage": "weights", "done": 1, "total": 2, "unit": "bytes", "detail": ""}),
        (Kind.REPLY, {"value": None}),
        (Kind.REVOKE, [0, 0]),
        (Kind.REVOKE, [0, 40]),
        (Kind.REVOKED, 0),
        (Kind.REVOKED, 40),
        (Kind.STEP, SchedulerOutput(3, req_idx=int32([1]), num_scheduled_tokens=int32([1]), is_leased=True)),
        (Kind.STEP, SchedulerOutput(3, page_copies=int32([1, 9, 4, 2]))),
        (Kind.STEP, SchedulerOutput(3, round_sizes=int32([4, 0]), round_has_prompts=True)),
        (Kind.JOIN, [[4, 0], False]),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5]), answered_at=12.25, seconds=0.5)),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5, 6]), counts=int32([0, 2]))),
        (
            Kind.OUTPUT,
            ModelRunnerOutput(3, int32([-1]), results=ResultColumns(int32([0]), int32([2]), float32([1, 2]))),
        ),
        (Kind.REPLY, {"error": ERROR}),
        (Kind.ERROR, ERROR),
        (Kind.LOG, LOG),
        (Kind.LOG, {**LOG, "level": 1000, "line": 0}),
        (Kind.CALL, ["ping", True, {"a": [1.5, None, b"x"]}]),
    ],
)
def test_what_was_packed_comes_out(kind: Kind, message: Any) -> None:
    assert unpack(kind, pack(message)) == message


def columns(**changes: Any) -> ModelRunnerOutput:
    parts = {name: getattr(COLUMNS, name) for name in LogprobColumns.__slots__}
    return ModelRunnerOutput(3, int32([5, 6]), LogprobColumns(**(parts | changes)))


@pytest.mark.parametrize(
    ("kind", "message", "text"),
    [
        (Kind.PROFILED, None, "NoneType"),
        (Kind.READY, None, "NoneType"),
        (Kind.READY, {"seconds": 1.5}, "not NoneType"),
        (Kind.READY, [1], "list"),
        (Kind.PROFILED, {**OFFER, "num_blocks": 0}, "num_blocks=0"),
        (Kind.PROFILED, {**OFFER, "block_size": True}, "not bool"),
        (Kind.PROFILED, {**OFFER, "vocab_size": 5.0}, "not float"),
        (Kind.PROFILED, {k: v for k, v in OFFER.items() if k != "max_model_len"}, "not NoneType"),
        (Kind.PROGRESS, {"done": 1}, "not NoneType"),
        (Kind.PROGRESS, {"stage": "weights", "done": "1"}, "not str"),
        (Kind.PROGRESS, {"stage": "weights", "colour": "red"}, "unknown 'colour'"),
        (Kind.PROGRESS, {"stage": 5}, "not int"),
        (Kind.ERROR, {"type": "ValueError", "message": "m"}, "not NoneType"),
        (Kind.LOG, None, "NoneType"),
        (Kind.LOG, {**LOG, "level": -1}, "level=-1"),
        (Kind.LOG, {**LOG, "level": 1001}, "level=1001"),
        (Kind.LOG, {**LOG, "level": "30"}, "not str"),
        (Kind.LOG, {**LOG, "line": 1 << 40}, "line="),
        (Kind.LOG, {**LOG, "created": float("nan")}, "nan"),
        (Kind.LOG, {**LOG, "created": None}, "number"),
        (Kind.LOG, {**LOG, "text": b"x"}, "not bytes"),
        (Kind.LOG, {name: value for name, value in LOG.items() if name != "thread"}, "not NoneType"),
        (Kind.REPLY, {}, "neither"),
        (Kind.REPLY, {"error": "text"}, "AttributeError"),
        (Kind.OUTPUT, columns(counts=int32([-1]), token_ids=int32(), values=float32()), "unequal length"),
        (Kind.OUTPUT, columns(token_idx=int32([2])), "not in the answer"),
        (Kind.OUTPUT, columns(token_idx=int32([-1])), "not in the answer"),
        (Kind.OUTPUT, [3, b"", None, [[0, "kind", 5]], 1.0, 0.0, None, None], "expected a text"),
        (Kind.OUTPUT, [3, b"123", None, [], 1.0, 0.0, None, None], "ValueError"),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32(), answered_at=float("nan")), "answered_at=nan"),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32(), answered_at="1"), "expected a number"),  # type: ignore[arg-type]
        (Kind.OUTPUT, ModelRunnerOutput(3, int32(), seconds=-1.0), "seconds=-1.0"),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32(), seconds=float("inf")), "seconds=inf"),
        (Kind.JOIN, [[], False], "without sizes"),
        (Kind.JOIN, [[4, -1], False], "without sizes"),
        (Kind.JOIN, [[4, 0], 1], "without sizes"),
        (Kind.JOIN, [4, 0], "TypeError"),
        (Kind.REVOKE, [-1, 3], "not a range of steps"),
        (Kind.REVOKE, [3, 2], "not a range of steps"),
        (Kind.REVOKE, [3], "not a range of steps"),
        (Kind.REVOKE, [1, 2, 3], "not a range of steps"),
        (Kind.REVOKED, -1, "REVOKED with -1"),
        (Kind.REVOKED, None, "integer"),
        (Kind.GRAMMAR, [3, b"", None], "expected bytes"),
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 1, 1, int32())]), "fit together"),
        (
            Kind.STEP,
            SchedulerOutput(
                3, new_requests=[NewRequest(0, int32([5]), 1, 0, int32([9]), block_spans=int32([0, 1, 7]))]
            ),
            "blocks of groups",
        ),
        (
            Kind.STEP,
            SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 1, 0, int32([9]), block_spans=int32([0, 2]))]),
            "blocks of groups",
        ),
        (Kind.STEP, SchedulerOutput(3, req_idx=int32([1])), "unequal length"),
        (Kind.STEP, SchedulerOutput(3, settled_rows=int32([1])), "unequal length"),
        (Kind.STEP, SchedulerOutput(3, page_copies=int32([1])), "unequal length"),
        (Kind.STEP, drafted(int32([2]), int32([7, 8])), "do not fit"),
        (Kind.STEP, drafted(int32([3, -1]), int32([7, 8])), "do not fit"),
        (Kind.STEP, drafted(int32([0, 1]), int32([7, 8])), "do not fit"),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5, 6]), counts=int32([1])), "do not fit"),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5, 6]), counts=int32([3, -1])), "do not fit"),
        (
            Kind.OUTPUT,
            ModelRunnerOutput(3, int32(), results=ResultColumns(int32([0, 1]), int32([1, 1]), float32([1]))),
            "sizes",
        ),
    ],
)
def test_what_does_not_have_its_form_is_refused(kind: Kind, message: Any, text: str) -> None:
    with pytest.raises(MessageError, match=text):
        unpack(kind, pack(message))


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, b"123", "error: unpack requires"),
        (0, None, "TypeError"),
        (1, None, "expected bytes"),
        (1, b"12345", "ValueError"),
        (4, 7, "expected bytes"),
        (5, [], "no mapping"),
        (5, {str(i): [] for i in range(65)}, "no mapping, or more"),
        (5, {5: []}, "columns by name"),
        (5, {"a": b"x"}, "columns by name"),
        (5, {"a": [5]}, "columns by name"),
    ],
)
def test_a_torn_request_is_refused(place: int, value: Any, text: str) -> None:
    step = msgpack.unpackb(pack(SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 1, 0, int32())])))
    step[4][0][place] = value
    with pytest.raises(MessageError, match=text):
        unpack(Kind.STEP, msgpack.packb(step))
    with pytest.raises(MessageError, match="ValueError"):
        unpack(Kind.STEP, msgpack.packb([*step[:4], [step[4][0][:3]], *step[5:]]))


def test_counts_that_cancel_out_are_found() -> None:
    two = columns(token_idx=int32([0, 1]), sampled=float32([0, 0]), counts=int32([3, -1]))
    with pytest.raises(MessageError, match="not in the answer"):
        unpack(Kind.OUTPUT, pack(two))


def test_an_error_does_not_show_all_that_was_sent() -> None:
    """msgpack's own for bytes after a message holds them all, twice as long when written out."""
    with pytest.raises(MessageError, match="ExtraData") as caught:
        unpack(Kind.PROFILED, msgpack.packb(OFFER) + b"\xff" * 1_000_000)
    assert len(str(caught.value)) < 500
    assert caught.value.__cause__ is None
