"""How far the first rank has begun the steps that it was given, and what was sampled in them, for the other ranks to
see: a page that all map.

A leased step may be taken back until it is begun, and each rank would have begun others by then. So the first rank
leads: it alone is told to drop leased steps and says which it dropped, and the others begin a leased step only when it
has begun that step.

    word 0      1 + the newest step that was begun
    256 ...     of step i at 256 + i % 256: 1 + i, 32 bits, and a checksum of its answer, 32 bits
"""

from __future__ import annotations

import mmap
import os

_OVER = 2**64 - 1
_ANSWERS, _NUM_ANSWERS = 256, 256  # slots for checksums of answers; more than there are ever steps in flight


def new_lead() -> int:
    """Make the memory for a `Lead`, without a name. Returns its descriptor. Raises OSError."""
    fd = os.memfd_create("aengine-lead", os.MFD_CLOEXEC)
    os.truncate(fd, mmap.PAGESIZE)
    return fd


class Lead:
    """The leading rank's progress, in memory that all ranks of a replica map. Steps are begun in the order of their
    ids, from 0 on."""

    def __init__(self, fd: int) -> None:
        """Map the inherited descriptor, and close it."""
        self._words = memoryview(mmap.mmap(fd, mmap.PAGESIZE)).cast("Q")
        self._seen = 0  # value of word 0 at the last look
        os.close(fd)

    def note_begun(self, step_id: int) -> None:
        """Publish that the leading rank begins this step. Called by that rank."""
        self._words[0] = step_id + 1

    def note_over(self) -> None:
        """Publish that the leading rank ends and begins no other step. Called by that rank."""
        self._words[0] = _OVER

    def look(self) -> None:
        """Note how far the first rank is now.

        What the host has published to this rank by then is to be taken before `has_begun` is asked: a newer step that
        the first rank has begun stands behind the message that drops leased ones.
        """
        self._seen = self._words[0]

    def has_begun(self, step_id: int) -> bool:
        """Return whether the leading rank had begun this step at the last `look`."""
        return step_id < self._seen != _OVER

    def note_answer(self, step_id: int, checksum: int) -> None:
        """Publish the checksum (32 bits) of the answer to a step. Called by the rank that answers."""
        self._words[_ANSWERS + step_id % _NUM_ANSWERS] = (step_id + 1 & 0xFFFF_FFFF) << 32 | checksum

    def checksum_of(self, step_id: int) -> int | None:
        """Return the checksum of the answer to this step; None: it has not been answered yet."""
        word = self._words[_ANSWERS + step_id % _NUM_ANSWERS]
        return word & 0xFFFF_FFFF if word >> 32 == step_id + 1 & 0xFFFF_FFFF else None

    @property
    def is_over(self) -> bool:
        return self._words[0] == _OVER
