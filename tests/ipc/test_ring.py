"""The ring by itself: both ends over plain memory, no process, no waiting."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aengine.ipc import ring as ring_module
from aengine.ipc.layout import (
    ABANDON,
    CONTROL_BYTES,
    FIRST,
    HEAD,
    LAST,
    NOTHING_WANTED,
    TAIL,
    WANTED,
    WHOLE,
    FrameError,
    frame_bytes,
)
from aengine.ipc.ring import Assembler, Consumer, Frame, Producer


def make_ring(capacity: int, fence: Callable[[], None] = lambda: None) -> tuple[memoryview, Producer, Consumer]:
    region = memoryview(bytearray(CONTROL_BYTES + capacity))
    region[:CONTROL_BYTES].cast("Q")[WANTED] = NOTHING_WANTED
    return region, Producer(region, fence), Consumer(region, fence)


def words(region: memoryview) -> memoryview:
    return region[:CONTROL_BYTES].cast("Q")


def test_frames_come_out_as_they_went_in() -> None:
    _, producer, consumer = make_ring(1024)
    assert consumer.is_empty() and not consumer.refresh() and consumer.read() is None and not consumer.spin(0)
    producer.write(3, 2**64 - 1, WHOLE, b"hello")
    producer.write(255, 0, WHOLE, b"")
    assert not consumer.is_empty() and consumer.spin(0)
    assert consumer.read() is None, "nothing is read before refresh() has looked"
    assert consumer.refresh()
    assert consumer.read() == (3, WHOLE, 2**64 - 1, b"hello")
    assert consumer.read() == (255, WHOLE, 0, b"")
    assert consumer.read() is None and consumer.is_empty()


def test_a_frame_that_fills_the_ring_exactly() -> None:
    _, producer, consumer = make_ring(256)
    full = bytes(range(256 - 40))
    assert frame_bytes(len(full)) == 256
    for lap in range(5):
        assert producer.has_room(256)
        producer.write(1, lap, WHOLE, full)
        assert not producer.has_room(32), "full is not empty"
        assert consumer.refresh() and consumer.read() == (1, WHOLE, lap, full)
    producer.write(1, 9, WHOLE, b"shift")
    consumer.refresh()
    consumer.read()
    producer.write(1, 10, WHOLE, full)  # now it straddles the end
    assert consumer.refresh() and consumer.read() == (1, WHOLE, 10, full)


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 2**32 - 1), st.sampled_from([256, 320, 512, 4096]))
def test_any_sequence_of_sizes_survives_any_interleaving(seed: int, capacity: int) -> None:
    rng = random.Random(seed)
    _, producer, consumer = make_ring(capacity)
    sent: list[tuple[int, int, int, bytes]] = []
    num_received = 0
    for step_id in range(200):
        payload = rng.randbytes(rng.choice([0, 1, 8, 23, 24, 25, rng.randrange(capacity - 40 + 1)]))
        as_sent = rng.choice([bytes, bytearray, memoryview])(payload)
        while not producer.has_room(frame_bytes(len(payload))):
            raw = consumer.read()
            if raw is None:
                assert consumer.refresh(), "a full ring has frames"
                continue
            assert raw == sent[num_received]
            num_received += 1
        sent.append((rng.randrange(256), WHOLE, step_id, payload))
        producer.write(sent[-1][0], step_id, WHOLE, as_sent)
    consumer.refresh()
    while (raw := consumer.read()) is not None:
        assert raw == sent[num_received]
        num_received += 1
        consumer.refresh()
    assert num_received == len(sent)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_a_changed_header_or_seal_is_found(data: st.DataObject) -> None:
    region, producer, consumer = make_ring(512)
    length = data.draw(st.integers(0, 200))
    for _ in range(data.draw(st.integers(0, 6))):
        producer.write(1, 1, WHOLE, b"x" * 100)
        consumer.refresh()
        consumer.read()
    position = words(region)[HEAD]
    producer.write(7, 41, WHOLE, bytes(length))
    where = data.draw(
        st.one_of(st.integers(0, 31), st.integers(frame_bytes(length) - 8, frame_bytes(length) - 1)), "where"
    )
    region[CONTROL_BYTES + (position + where) % 512] ^= data.draw(st.integers(1, 255), "flip")
    consumer.refresh()
    with pytest.raises(FrameError):
        consumer.read()
    with pytest.raises(FrameError):  # and it stays found
        consumer.read()


def test_a_head_published_before_the_frame_is_found() -> None:
    """What a processor that reorders stores would show without the fence: zeros, or the frame of an earlier lap."""
    region, producer, consumer = make_ring(256)
    words(region)[HEAD] = 64
    assert consumer.refresh()
    with pytest.raises(FrameError, match="no frame at position 0"):
        consumer.read()

    region, producer, consumer = make_ring(256)
    for lap in range(4):
        producer.write(1, lap, WHOLE, b"y" * 10)
        consumer.refresh()
        consumer.read()
    words(region)[HEAD] += 64
    assert consumer.refresh()
    with pytest.raises(FrameError, match="no frame at position 256"):
        consumer.read()


def test_a_seal_of_an_earlier_lap_is_found() -> None:
    region, producer, consumer = make_ring(256)
    for lap in range(4):
        producer.write(1, lap, WHOLE, b"y" * 10)
        consumer.refresh()
        consumer.read()
    stale = bytes(region[CONTROL_BYTES + 56 : CONTROL_BYTES + 64])
    producer.write(1, 4, WHOLE, b"z" * 10)
    region[CONTROL_BYTES + 56 : CONTROL_BYTES + 64] = stale
    consumer.refresh()
    with pytest.raises(FrameError, match="torn"):
        consumer.read()


@pytest.mark.parametrize("head", [1, 32 * 9, 2**64 - 32, 2**63])
def test_an_impossible_head_is_found(head: int) -> None:
    region, _, consumer = make_ring(256)
    words(region)[HEAD] = head
    with pytest.raises(FrameError, match="head"):
        consumer.refresh()


def test_a_head_that_goes_back_is_found() -> None:
    region, producer, consumer = make_ring(256)
    producer.write(1, 0, WHOLE, b"")
    consumer.refresh()
    words(region)[HEAD] = 0
    with pytest.raises(FrameError, match="head"):
        consumer.refresh()


@pytest.mark.parametrize("tail", [257, 2**64 - 1])
def test_an_impossible_tail_is_found(tail: int) -> None:
    region, producer, _ = make_ring(256)
    producer.write(1, 0, WHOLE, bytes(216))
    words(region)[TAIL] = tail
    with pytest.raises(FrameError, match="tail"):
        producer.has_room(64)


@settings(max_examples=60, deadline=None)
@given(st.binary(min_size=256, max_size=256), st.integers(0, 8))
def test_foreign_bytes_never_make_a_frame(data: bytes, frames: int) -> None:
    region, _, consumer = make_ring(256)
    region[CONTROL_BYTES:] = data
    words(region)[HEAD] = frames * 32
    if consumer.refresh():
        with pytest.raises(FrameError):
            consumer.read()


@pytest.mark.parametrize("length", [225, 2**32, 2**64 - 1])
def test_a_length_past_the_head_is_found(length: int) -> None:
    region, producer, consumer = make_ring(256)
    producer.write(1, 0, WHOLE, b"abc")
    region[CONTROL_BYTES + 24 : CONTROL_BYTES + 32] = length.to_bytes(8, "little")
    consumer.refresh()
    with pytest.raises(FrameError, match="past head"):
        consumer.read()


class Recorder:
    """Stands for an end's words and notes each access."""

    def __init__(self, events: list[str], names: dict[int, str], real: memoryview) -> None:
        self.events, self.names, self.real = events, names, real

    def __getitem__(self, index: int) -> int:
        self.events.append("load " + self.names.get(index, "seal"))
        return self.real[index]

    def __setitem__(self, index: int, value: int) -> None:
        self.events.append("store " + self.names.get(index, "seal"))
        self.real[index] = value


@pytest.mark.parametrize("weak", [False, True])
def test_fences_lie_where_the_invariant_needs_them(monkeypatch: pytest.MonkeyPatch, weak: bool) -> None:
    monkeypatch.setattr(ring_module, "is_weakly_ordered", lambda: weak)
    events: list[str] = []
    names = {HEAD: "head", TAIL: "tail", WANTED: "wanted"}
    _, producer, consumer = make_ring(256, fence=lambda: events.append("fence"))
    for end in (producer, consumer):
        end._words = Recorder(events, names, end._words)  # type: ignore[assignment]
        end._data_words = Recorder(events, {}, end._data_words)  # type: ignore[assignment]
    order = ["fence"] if weak else []

    producer.write(1, 0, WHOLE, b"abc")
    assert events == ["store seal", *order, "store head", "fence"]
    events.clear()
    assert consumer.refresh() and consumer.read() and not consumer.producer_waits()
    assert events == ["load head", *order, "load seal", *order, "store tail", "fence", "load wanted"]
    events.clear()
    assert producer.has_room(256)
    assert events == ["load tail", *order]
    events.clear()
    producer.want_room(256)
    assert events == ["store wanted", "fence"]


def test_wanted_says_when_there_will_be_room() -> None:
    _, producer, consumer = make_ring(256)
    for step_id in range(4):
        producer.write(1, step_id, WHOLE, b"")
    producer.want_room(128)
    assert not producer.has_room(128)
    waits = []
    consumer.refresh()
    while consumer.read() is not None:
        waits.append(consumer.producer_waits())
    assert waits == [False, True, True, True], "two frames of 64 bytes have to go"
    assert producer.has_room(128)
    producer.stop_wanting()
    assert not consumer.producer_waits()


def test_fragments_join_and_do_not_mix() -> None:
    assembler = Assembler(limit=100)
    assert assembler.add(1, WHOLE, 5, b"whole") == Frame(1, 5, b"whole")
    assert assembler.add(1, FIRST, 6, b"a" * 40) is None
    assert assembler.add(1, 0, 6, b"b" * 40) is None
    assert assembler.add(1, LAST, 6, b"c" * 20) == Frame(1, 6, b"a" * 40 + b"b" * 40 + b"c" * 20)
    assert assembler.add(2, FIRST, 7, b"given up") is None
    assert assembler.add(3, WHOLE | ABANDON, 8, b"next") == Frame(3, 8, b"next")
    assert assembler.add(2, FIRST, 7, b"given up") is None
    assert assembler.add(3, FIRST | ABANDON, 8, b"ne") is None
    assert assembler.add(3, LAST, 8, b"xt") == Frame(3, 8, b"next")


@pytest.mark.parametrize(
    "frames",
    [
        [(1, 0, 0, b"middle without a first")],
        [(1, LAST, 0, b"last without a first")],
        [(1, FIRST, 0, b""), (1, FIRST, 0, b"")],
        [(1, FIRST, 0, b""), (1, WHOLE, 0, b"")],
        [(1, FIRST, 0, b""), (2, LAST, 0, b"another kind")],
        [(1, FIRST, 0, b""), (1, LAST, 1, b"another step")],
        [(1, FIRST, 0, b"x" * 60), (1, LAST, 0, b"x" * 41)],
        [(1, WHOLE | 8, 0, b"an unknown flag")],
    ],
)
def test_fragments_that_do_not_follow_each_other_are_found(frames: list[tuple[int, int, int, bytes]]) -> None:
    assembler = Assembler(limit=100)
    *good, bad = frames
    for frame in good:
        assert assembler.add(*frame) is None
    with pytest.raises(FrameError):
        assembler.add(*bad)
