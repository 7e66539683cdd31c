"""What comes over the rings is data: checked, bounded, never code."""

from __future__ import annotations

import random
from array import array
from typing import Any

import msgpack
import pytest

from aengine.ipc.messages import (
    PLAN_LIMITS,
    STATE_BLOCK_SIZE,
    DraftColumns,
    GrammarOutput,
    Kind,
    KVCacheGroup,
    LogprobColumns,
    MessageError,
    ModelRunnerOutput,
    NewRequest,
    ResultColumns,
    RowError,
    SchedulerOutput,
    float32,
    int32,
    int32_of,
    kv_capacity,
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
MANY_EXTRAS: dict[str, list[bytes]] = {str(i): [] for i in range(64)}


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
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 1, 0, int32(), extras=MANY_EXTRAS)])),
        (Kind.STEP, SchedulerOutput(3, int32([4]), int32([2]), int32([1]))),
        (Kind.STEP, drafted(int32([0, 2]), int32([7, 8]))),
        (Kind.GRAMMAR, GrammarOutput(3, int32([0]), b"\x01\x02\x03\x04")),
        (Kind.GRAMMAR, GrammarOutput(3, int32([0]), 4)),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5, -1]), COLUMNS, [RowError(1, "InvalidRequestError", "nan")])),
        (Kind.OUTPUT, ModelRunnerOutput(3, int32([5]), ALONE)),
        (Kind.PROFILED, OFFER | {"dtype": "float32"}),
        (Kind.PROFILED, {**dict.fromkeys(OFFER, 1), "kv_groups": [["full", 1, 0], ["state", 1, 0], ["window", 1, 1]]}),
        (Kind.ALLOCATE, dict.fromkeys(PLAN_LIMITS, 1)),
        (Kind.READY, {"pid": 7, "device": "cpu", "seconds": 1.5}),
        (Kind.PROGRESS, {"stage": "weights"}),
        (Kind.PROGRESS, {"stage": "weights", "done": 1, "total": 2, "unit": "bytes", "detail": ""}),
        (Kind.REPLY, {"value": None}),
        (Kind.REVOKE, [0, 0]),
        (Kind.REVOKE, [0, 40]),
        (Kind.REVOKED, 0),
        (Kind.REVOKED, 40),
        (Kind.STEP, SchedulerOutput(3, req_idx=int32([1]), num_scheduled_tokens=int32([1]), is_leased=True)),
        (Kind.STEP, SchedulerOutput(3, page_copies=int32([1, 9, 4, 2]), kept_states=int32([1, 40, 0, 7]))),
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
        (Kind.LOG, {**LOG, "level": 0, "line": (1 << 31) - 1, "created": 0.0}),
        (Kind.CALL, ["ping", True, {"a": [1.5, None, b"x"]}]),
    ],
)
def test_what_was_packed_comes_out(kind: Kind, message: Any) -> None:
    assert unpack(kind, pack(message)) == message


def full_step(rng: random.Random, **changes: Any) -> SchedulerOutput:
    """A step in which every column has two entries or more, and every number is another one."""

    def some(count: int) -> array[int]:
        return int32(rng.sample(range(1, 10_000), count))

    new = NewRequest(3, some(6), 4, 2, some(5), 0.5, 0.75, 40, 0.25, -(2**63), 0.5, -0.5, 1.25, 2, 3, 99, 7, some(2))
    new.block_spans, new.extras = int32([1, 2, 0, 3]), {"logit_bias": [b"abcd", b""]}
    drafts = DraftColumns(int32([0, 2, 1]), some(2), int32([0, 1, 0]), int32([0, 0, 1]))
    fields = {
        "settled_rows": some(2),
        "num_rejected": some(2),
        "removed": some(2),
        "new_requests": [new],
        **{name: some(2) for name in ("block_rows", "block_ids", "block_groups")},
        **{name: some(3) for name in ("req_idx", "num_scheduled_tokens")},
        "sample_now": rng.random() < 0.5,
        "is_leased": rng.random() < 0.5,
        "round_has_prompts": rng.random() < 0.5,
        "drafts": drafts,
        "page_copies": some(4),
        "kept_states": some(4),
        "round_sizes": some(2),
    }
    return SchedulerOutput(rng.randrange(2**40), **fields | changes)


def full_answer(rng: random.Random) -> ModelRunnerOutput:
    def some(count: int) -> array[float]:
        return float32(rng.randrange(1000) / 8 for _ in range(count))

    return ModelRunnerOutput(
        rng.randrange(2**40),
        int32([7, -1, 9]),
        LogprobColumns(int32([2, 0]), some(2), int32([1, 2]), int32([4, 5, 6]), some(3)),
        [RowError(1, "InternalError", "nan"), RowError(2, "E", "")],
        rng.random(),
        rng.random(),
        int32([2, 1]),
        ResultColumns(int32([1, 2]), int32([2, 0]), some(2)),
    )


def test_every_field_comes_out_as_it_went_in(rng: random.Random) -> None:
    for _ in range(8):  # the flags differ
        step, answer = full_step(rng), full_answer(rng)
        assert unpack(Kind.STEP, pack(step)) == step and unpack(Kind.OUTPUT, pack(answer)) == answer
        assert answer.results is not None
        assert answer.results.items() == [(1, answer.results.values), (2, float32())]
        assert answer.num_tokens() == int32([2, 1])
    assert ModelRunnerOutput(1, int32([0, -1, 5])).num_tokens() == [1, 0, 1]


@pytest.mark.parametrize("change", ["shorter", "longer"])
def test_a_column_that_does_not_fit_the_others_is_refused(rng: random.Random, change: str) -> None:
    """Whichever it is: one entry is missing, or one too many."""
    of_steps = "settled_rows num_rejected block_rows block_ids block_groups req_idx num_scheduled_tokens"
    columns = (*of_steps.split(), "page_copies", "kept_states")
    places: list[tuple[Kind, str, str]] = [(Kind.STEP, "", name) for name in columns]
    places += [(Kind.STEP, "drafts", name) for name in DraftColumns.__slots__]
    places += [(Kind.OUTPUT, "", name) for name in ("token_ids", "counts")]
    places += [(Kind.OUTPUT, "logprobs", name) for name in LogprobColumns.__slots__]
    places += [(Kind.OUTPUT, "results", name) for name in ResultColumns.__slots__]
    for kind, part, name in places:
        message = full_step(rng) if kind is Kind.STEP else full_answer(rng)
        owner = getattr(message, part) if part else message
        column = getattr(owner, name)
        setattr(owner, name, column[:-1] if change == "shorter" else column + column[:1])
        with pytest.raises(MessageError, match=f"{message.step_id}: "):
            unpack(kind, pack(message))


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
        (Kind.PROGRESS, {"stage": "weights", "unit": 5}, "not int"),
        (Kind.ERROR, {"type": "ValueError", "message": "m"}, "not NoneType"),
        (Kind.LOG, None, "NoneType"),
        (Kind.LOG, {**LOG, "level": -1}, "level=-1"),
        (Kind.LOG, {**LOG, "level": 1001}, "level=1001"),
        (Kind.LOG, {**LOG, "level": "30"}, "not str"),
        (Kind.LOG, {**LOG, "line": 1 << 31}, "line="),
        (Kind.LOG, {**LOG, "line": -1}, "line="),
        (Kind.LOG, {**LOG, "created": -1.0}, "created at"),
        (Kind.LOG, {**LOG, "created": 1e11}, "created at"),
        (Kind.LOG, {**LOG, "created": float("nan")}, "nan"),
        (Kind.LOG, {**LOG, "created": None}, "number"),
        (Kind.LOG, {**LOG, "text": b"x"}, "not bytes"),
        (Kind.LOG, {name: value for name, value in LOG.items() if name != "thread"}, "not NoneType"),
        (Kind.REPLY, {}, "neither"),
        (Kind.REPLY, {"error": "text"}, "AttributeError"),
        (Kind.OUTPUT, columns(counts=int32([-1]), token_ids=int32(), values=float32()), "unequal length"),
        (Kind.OUTPUT, columns(token_idx=int32([2])), "not in the answer"),
        (Kind.OUTPUT, columns(token_idx=int32([-1])), "not in the answer"),
        (Kind.OUTPUT, [3, b"", None, [[0, "kind", 5]], 1.0, 0.0, None, None, 0, 0], "expected a text"),
        (Kind.OUTPUT, [3, b"", None, [], 1.0, 0.0, None, None, 3, 0], "graph_mode=3"),
        (Kind.OUTPUT, [3, b"", None, [], 1.0, 0.0, None, None, 2, -1], "num_paddings=-1"),
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
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 1, -1, int32())]), "fit together"),
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 0, 0, int32())]), "fit together"),
        (Kind.STEP, SchedulerOutput(3, new_requests=[NewRequest(0, int32([5]), 2, 0, int32())]), "fit together"),
        (Kind.PROFILED, OFFER | {"kv_groups": [["half", 16, 0]]}, "kind=half"),
        (Kind.PROFILED, OFFER | {"kv_groups": [["full", 0, 0]]}, "block_size=0"),
        (Kind.PROFILED, OFFER | {"kv_groups": [["full", 16, 0], ["window", 16, -1]]}, "window=-1"),
        (Kind.ALLOCATE, {**OFFER, "max_model_len": 0}, "max_model_len=0"),
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


def test_a_features_columns_are_whole_numbers() -> None:
    assert int32_of([int32([5, -6]).tobytes(), b""], 2) == [int32([5, -6]), int32()]
    for extra in ([b"abcd"], [b"abcd", b"abcde"], [b""] * 3):
        with pytest.raises(MessageError, match="columns instead of 2"):
            int32_of(extra, 2)


def test_the_kv_groups_of_a_worker_that_has_not_said_any() -> None:
    groups = [KVCacheGroup("state", STATE_BLOCK_SIZE), KVCacheGroup("window", 16, 9)]
    said = [[group.kind, group.block_size, group.window] for group in groups]
    assert KVCacheGroup.from_ready({"block_size": 4, "kv_groups": said}) == tuple(groups)
    assert KVCacheGroup.from_ready({"block_size": 4}) == (KVCacheGroup("full", 4),)


def test_how_much_one_request_can_hold(rng: random.Random) -> None:
    """By walking through its steps: a window's block is freed when the next step's first query is past it."""
    full, window = KVCacheGroup("full", 4), KVCacheGroup("window", 4, 9)  # a step of 8 tokens sees 16 of the window
    assert kv_capacity([full], 10, 1000, 8) == 40 and kv_capacity([full], 10, 39, 8) == 39
    assert kv_capacity([window], 5, 1000, 8) == 1000 and kv_capacity([window], 4, 1000, 8) == 16
    assert kv_capacity([full, window], 10, 1000, 8) == 20
    assert kv_capacity([KVCacheGroup("state", STATE_BLOCK_SIZE), full], 3, 1000, 8) == 8
    for _ in range(200):
        group = KVCacheGroup("window", rng.randint(1, 6), rng.randint(1, 20))
        num_tokens, step = rng.randint(1, 60), rng.randint(1, 9)
        begin, most = rng.randrange(step), 0
        for end in [*range(begin, num_tokens, step), num_tokens]:
            first = max(0, begin - group.window + 1) // group.block_size
            begin, most = end, max(most, -(-end // group.block_size) - first)
        assert most <= group.most_blocks(num_tokens, step) <= -(-num_tokens // group.block_size)
