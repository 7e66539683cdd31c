"""A single-producer, single-consumer ring of frames in shared memory, without a lock. `layout` draws its bytes.

Neither side ever waits here, and neither trusts the other: every word read is checked against what it may be, and
a wrong one raises FrameError. What makes it right is the order of loads and stores, in the other process's eyes:

    producer                                      consumer
    1 load tail: is there room?                   1 load head: is there a frame?
      (fence)                                       (fence)
    2 store header, payload, seal                 2 load header, payload, seal
      (fence)                                       (fence)
    3 store head                                  3 store tail
      fence                                         fence
    4 load the doorbell: is the worker asleep?    4 load wanted: does the producer wait for room?

The fences in brackets keep stores behind stores and loads behind loads. x86 does so by itself, so they are made only
elsewhere (`doorbell.is_weakly_ordered`). The ones before step 4 keep a load behind a store, which no processor does by
itself: without them both sides could miss each other and sleep for ever. Each end is used by one thread at a time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import NamedTuple

from .doorbell import is_weakly_ordered
from .layout import (
    ABANDON,
    ALIGN,
    CONTROL_BYTES,
    FIRST,
    HEAD,
    HEADER,
    LAST,
    MAGIC,
    NOTHING_WANTED,
    SEAL_BYTES,
    TAIL,
    VERSION,
    WANTED,
    WHOLE,
    FrameError,
    frame_bytes,
    seal_of,
)

_pack_header = HEADER.pack_into
_unpack_header = HEADER.unpack_from


class Frame(NamedTuple):
    """A whole message as it came out of the ring."""

    kind: int
    step_id: int
    payload: bytes


class _End:
    """The state that both ends of a ring have. ``region``: the ring's control words and data, see `layout`."""

    __slots__ = ("_data", "_data_words", "_fence", "_head", "_order", "_tail", "_words", "capacity")

    def __init__(self, region: memoryview, fence: Callable[[], None]) -> None:
        self._words = region[:CONTROL_BYTES].cast("Q")
        self._data = region[CONTROL_BYTES:]
        self._data_words = self._data.cast("Q")
        self.capacity = len(self._data)
        self._fence = fence
        self._order = fence if is_weakly_ordered() else None
        self._head = self._tail = 0  # positions that this end has read last; a new ring begins at 0

    def release(self) -> None:
        """Release the memory, so that it can be unmapped; nothing else may be called after."""
        self._words.release()
        self._data_words.release()
        self._data.release()


class Producer(_End):
    """The writing end of a ring. One thread of one process uses it."""

    __slots__ = ("_unfinished", "fragment_length")

    def __init__(self, region: memoryview, fence: Callable[[], None]) -> None:
        super().__init__(region, fence)
        self._unfinished = False
        # A quarter of the ring: the two sides copy at the same time, one fragment behind the other.
        self.fragment_length = self.capacity // 4 // ALIGN * ALIGN - HEADER.size - SEAL_BYTES

    def has_room(self, size: int) -> bool:
        """Return whether a frame of ``size`` bytes (`frame_bytes`) fits now. Raises FrameError when tail is
        impossible."""
        if self._head + size - self._tail <= self.capacity:
            return True
        tail = self._words[TAIL]
        if self._order:
            self._order()
        if not self._tail <= tail <= self._head:
            raise FrameError(f"tail {tail} is not between {self._tail} and head {self._head}")
        self._tail = tail
        return self._head + size - tail <= self.capacity

    def want_room(self, size: int) -> None:
        """Request a wake-up for when ``size`` bytes fit. Check has_room() once more after it, before sleeping."""
        self._words[WANTED] = self._head + size - self.capacity
        self._fence()

    def stop_wanting(self) -> None:
        self._words[WANTED] = NOTHING_WANTED

    def write(self, kind: int, step_id: int, flags: int, payload: bytes | memoryview) -> None:
        """Put in one frame, for which there is room. Afterwards the head is visible before any later load."""
        if self._unfinished and flags & FIRST:
            flags |= ABANDON
        data, capacity = self._data, self.capacity
        position, length = self._head, len(payload)
        end = position + frame_bytes(length)
        offset = position % capacity
        _pack_header(data, offset, MAGIC, VERSION, kind, flags, position, step_id, length)
        start = offset + HEADER.size
        if start + length <= capacity:
            data[start : start + length] = payload
        else:
            cut = capacity - start
            payload = memoryview(payload)
            data[start:] = payload[:cut]
            data[: length - cut] = payload[cut:]
        self._data_words[(end - SEAL_BYTES) % capacity >> 3] = seal_of(position, kind, flags, step_id, length)
        if self._order:
            self._order()
        self._unfinished = not flags & LAST
        # set before the shared word: if an interrupt falls between, the next write publishes this frame too
        self._head = end
        self._words[HEAD] = end
        self._fence()

    def fragments(self, payload: bytes | memoryview) -> Iterator[tuple[int, memoryview]]:
        """Yield flags and payload of each frame of a message that is too long for one."""
        view, step = memoryview(payload), self.fragment_length
        for start in range(0, len(view), step):
            flags = (FIRST if start == 0 else 0) | (LAST if start + step >= len(view) else 0)
            yield flags, view[start : start + step]


class Consumer(_End):
    """The reading end of a ring. One thread of one process uses it."""

    __slots__ = ()

    def is_empty(self) -> bool:
        """Return whether there is nothing to look at. (False too when head is impossible: refresh() will say so.)"""
        return self._words[HEAD] == self._tail

    def spin(self, seconds: float) -> bool:
        """Busy-wait for a frame. False: none came."""
        words, tail, clock = self._words, self._tail, time.monotonic
        until = clock() + seconds
        while words[HEAD] == tail:
            if clock() >= until:
                return False
        return True

    def refresh(self) -> bool:
        """Take note of what the producer has published. False: nothing new. FrameError: head is impossible."""
        head = self._words[HEAD]
        if self._order:
            self._order()
        if head == self._head:
            return head != self._tail
        if head < self._head or head - self._tail > self.capacity or head % ALIGN:
            raise FrameError(f"head {head} is impossible: it was {self._head}, the ring has {self.capacity} bytes")
        self._head = head
        return True

    def read(self) -> tuple[int, int, int, bytes] | None:
        """Return the next frame noted by refresh(): kind, flags, step_id, payload. Raises FrameError if it isn't
        whole."""
        position = self._tail
        if position == self._head:
            return None
        data, capacity = self._data, self.capacity
        offset = position % capacity
        magic, version, kind, flags, claimed, step_id, length = _unpack_header(data, offset)
        if magic != MAGIC or version != VERSION or claimed != position:
            raise FrameError(
                f"no frame at position {position}: magic {magic:#x}, version {version}, position {claimed}"
            )
        end = position + frame_bytes(length)
        if end > self._head:
            raise FrameError(f"frame at {position}: length {length} reaches past head {self._head}")
        seal = self._data_words[(end - SEAL_BYTES) % capacity >> 3]
        if seal != seal_of(position, kind, flags, step_id, length):
            raise FrameError(f"torn frame at {position}: the seal at its end, {end}, does not fit its header")
        start = offset + HEADER.size
        stop = start + length
        if stop <= capacity:
            payload = bytes(data[start:stop])
        else:
            payload = b"".join((data[start:], data[: stop - capacity]))
        if self._order:
            self._order()
        self._tail = end
        self._words[TAIL] = end
        return kind, flags, step_id, payload

    def producer_waits(self) -> bool:
        """Return whether the reads so far make the room that the producer waits for, so that it has to be woken."""
        self._fence()
        return self._words[WANTED] <= self._tail


class Assembler:
    """Joins fragments to messages of up to ``limit`` bytes. FrameError for fragments that don't follow each other."""

    __slots__ = ("_kind", "_limit", "_parts", "_size", "_step_id")

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._parts: list[bytes] = []
        self._size = 0
        self._kind = self._step_id = 0

    def add(self, kind: int, flags: int, step_id: int, payload: bytes) -> Frame | None:
        if flags == WHOLE and not self._parts:
            return Frame(kind, step_id, payload)
        if flags & ABANDON:
            self._parts.clear()
            self._size = 0
        if bool(flags & FIRST) == bool(self._parts) or flags & ~(WHOLE | ABANDON):
            raise FrameError(f"a fragment of kind {kind} with flags {flags} after {len(self._parts)} others")
        if self._parts and (kind, step_id) != (self._kind, self._step_id):
            raise FrameError(f"a fragment of kind {kind} in a message of kind {self._kind}")
        self._size += len(payload)
        if self._size > self._limit:
            raise FrameError(f"a message of over {self._limit} bytes")
        self._kind, self._step_id = kind, step_id
        self._parts.append(payload)
        if not flags & LAST:
            return None
        whole = self._parts[0] if len(self._parts) == 1 else b"".join(self._parts)
        self._parts.clear()
        self._size = 0
        return Frame(kind, step_id, whole)
