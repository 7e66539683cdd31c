"""The bytes of the shared memory, and what makes a frame whole.

One segment joins the host with one worker. All numbers are little-endian; offsets are in bytes.

    segment   0        128                      128 + R                    128 + 2R         next page
              +--------+------------------------+------------------------+  ......  +---------+
              | label  | ring host -> worker    | ring worker -> host    |          | bitmask |      R = 256 + capacity
              +--------+------------------------+------------------------+  ......  +---------+
    label     magic u64, version u64, capacity u64, bytes of the bitmask u64, nonce [16], 16 unused; then, written by
              the worker, at 64, how often its heart has beaten, u64, and, at 72, the bytes of device memory that it had
              then, u64, and, at 80, the state of the device's oldest step (`DeviceWatch.word`), u64
    bitmask   any bytes: where a grammar's threads write what a GRAMMAR frame then refers to, without a copy

    ring      0          8                128        256                  256 + capacity
              +----------+----------------+----------+--------------------+
              | head u64 | wanted u64     | tail u64 | data               |
              +----------+----------------+----------+--------------------+
              `-- written by the producer `-- by the consumer

    data      positions tail .. head hold whole frames; the byte of position p lies at data[p % capacity]

              tail % capacity                      head % capacity
                    v                                    v
              ......[frame][frame][frame][frame][  frame].........

    frame     0         4          5       6         8             16          24         32
              +---------+----------+-------+---------+-------------+-----------+----------+
              | magic 4 | version 1| kind 1| flags 2 | position 8  | step_id 8 | length 8 |
              +---------+----------+-------+---------+-------------+-----------+----------+
              | payload [length] ... padding to the next multiple of 32, less 8 | seal 8   |
              +------------------------------------------------------------------+---------+

What holds:

- head, tail and wanted are *positions*: they count bytes since the start and never wrap, so head - tail is what is
  in the ring, and an empty ring (0) can't be taken for a full one (capacity). 2**64 bytes take 58 years at 10 GB/s.
- Each word is written by one side only, in one aligned 8-byte store (``memoryview.cast("Q")[i] = v``;
  ``struct.pack_into`` would store byte by byte). head and tail are 128 bytes apart: processors fetch cache lines of
  64 bytes in pairs.
- wanted is the tail that a producer in want of room waits for, or NOTHING_WANTED.
- Frames start at multiples of 32 and capacity is one too, so that header and seal never straddle the ring's end;
  only a payload can, and is then copied in two pieces.
- A frame is whole when header and seal agree with each other and with the position it is read at. The seal is written
  after the payload and made of all that the header says, ``position`` (where the frame starts) included. So what an
  earlier lap, a half-done write or another program left there does not fit, and raises FrameError.
- A message may take several frames: FIRST and LAST mark its ends. ABANDON on a FIRST says that the message before it
  was given up by its sender (a cancelled publish) and will not be finished.
"""

from __future__ import annotations

import struct


class FrameError(ValueError):
    """The shared memory holds what the other side can't have written: torn, foreign or out of range.

    The channel can't be used further; nothing after a bad frame can be trusted.
    """


ALIGN = 32
LABEL = struct.Struct("<QQQQ16s")
LABEL_BYTES = 128
HEARTBEAT = slice(64, 88)
PAGE_BYTES = 4096
LABEL_MAGIC = int.from_bytes(b"aengine\0", "little")

HEAD, WANTED, TAIL = 0, 1, 16  # places of the 8-byte words in the control block
CONTROL_BYTES = 256
NOTHING_WANTED = 2**64 - 1

HEADER = struct.Struct("<IBBHQQQ")  # magic, version, kind, flags, position, step_id, length
SEAL_BYTES = 8
MAGIC = int.from_bytes(b"aefr", "little")
VERSION = 2
SEAL = 0x9E37_79B9_7F4A_7C15  # any constant with no structure: a seal is never a plausible length or position

FIRST, LAST, ABANDON = 1, 2, 4
WHOLE = FIRST | LAST

MIN_CAPACITY = 4 * ALIGN  # a fragment takes a quarter of the ring, and must hold some bytes


def frame_bytes(length: int) -> int:
    """Return how many bytes of the ring a frame with ``length`` bytes of payload takes."""
    return (HEADER.size + length + SEAL_BYTES + ALIGN - 1) & -ALIGN


def seal_of(position: int, kind: int, flags: int, step_id: int, length: int) -> int:
    """Return the seal of a frame; 64 bits, as each part has no more. Changes with any one of the fields."""
    return position + length ^ step_id ^ kind << 56 ^ flags << 40 ^ SEAL


def round_capacity(ring_bytes: int) -> int:
    """Return the capacity of a ring of at least ``ring_bytes``, such that what follows it starts on a cache line."""
    return max(MIN_CAPACITY * 2, (ring_bytes + 63) & -64)


def segment_bytes(capacity: int, bitmask_bytes: int = 0) -> int:
    """Return the size of the segment with two rings of ``capacity`` bytes of data and ``bitmask_bytes`` after them."""
    return bitmask_span(capacity, bitmask_bytes).stop if bitmask_bytes else _rings_end(capacity)


def bitmask_span(capacity: int, bitmask_bytes: int) -> slice:
    """Return the place of the bitmask in the segment, in bytes."""
    start = (_rings_end(capacity) + PAGE_BYTES - 1) & -PAGE_BYTES
    return slice(start, start + bitmask_bytes)


def _rings_end(capacity: int) -> int:
    return LABEL_BYTES + 2 * (CONTROL_BYTES + capacity)


def ring_span(index: int, capacity: int) -> slice:
    """Return the place of ring 0 (host -> worker) or 1 (worker -> host) in the segment, in bytes."""
    start = LABEL_BYTES + index * (CONTROL_BYTES + capacity)
    return slice(start, start + CONTROL_BYTES + capacity)
