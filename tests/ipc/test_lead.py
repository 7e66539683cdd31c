"""How far the leading rank is, as the others see it."""

from __future__ import annotations

import os

import pytest

from aengine.ipc.lead import Lead, new_lead


def two_ranks() -> tuple[Lead, Lead]:
    fd = new_lead()
    other = os.dup(fd)
    return Lead(fd), Lead(other)


def test_what_the_leader_has_begun_is_known_at_the_next_look() -> None:
    leader, other = two_ranks()
    for step_id in range(3):
        leader.note_begun(step_id)
        assert not other.has_begun(step_id)
        other.look()
        assert other.has_begun(step_id) and other.has_begun(0) and not other.has_begun(step_id + 1)
    assert not other.is_over
    leader.note_over()
    assert other.has_begun(2) and other.is_over, "as of the last look"
    other.look()
    assert not other.has_begun(0), "it begins nothing more, whatever is asked for"


def test_nothing_is_begun_before_the_first_look() -> None:
    leader, other = two_ranks()
    assert not other.has_begun(0)
    other.look()
    assert not other.has_begun(0) and not leader.is_over


def test_checksums_of_the_latest_256_answers() -> None:
    leader, other = two_ranks()
    assert other.checksum_of(0) is None
    for step_id in range(300):
        leader.note_answer(step_id, (0xFFFF_FFFF - step_id) & 0xFFFF_FFFF)
        assert other.checksum_of(step_id + 1) is None
    assert [other.checksum_of(step_id) for step_id in (43, 44, 299)] == [None, 0xFFFF_FFFF - 44, 0xFFFF_FFFF - 299]
    far = 2**32 + 5
    leader.note_answer(far, 0)
    assert other.checksum_of(far) == 0 and other.checksum_of(far + 256) is None
    leader.look()
    assert not leader.has_begun(0), "checksums and steps do not share a word"


def test_the_descriptor_is_closed() -> None:
    fd = new_lead()
    Lead(fd)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(fd)
