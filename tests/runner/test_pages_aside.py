"""Pages of KV copied aside and back: all of a page, in order, and what is said of one that does not arrive."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from aengine.errors import InternalError
from aengine.ipc.messages import KVCacheGroup
from aengine.runner.attention import swap_space
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.kv_pages import KVPages
from aengine.runner.attention.swap_space import SwapSpace
from aengine.runner.kv_spec import KVLayout
from aengine.runner.platforms.cpu import CpuPlatform

NUM_PAGES = 10
NONE = np.array([], dtype=np.int64)


class Failing(CpuPlatform):
    """Copies fail while ``fails`` is set."""

    fails = False

    def launch(self, work: Callable[[], None], after: Any) -> None:
        if self.fails:
            raise RuntimeError("no copy")
        work()


def space_of(dtype: torch.dtype = torch.float32, *, is_alone: bool = True, slab_bytes: int = 48) -> Any:
    layout = KVLayout((KVCacheGroup("full", 4),), (), 3, slab_bytes)
    pages = KVPages(layout, NUM_PAGES, KVFormat(dtype), torch.device("cpu"))
    for i, slab in enumerate(pages.slabs):
        slab.view(torch.uint8).copy_(torch.arange(slab.nbytes).view(NUM_PAGES, -1) * (7 + i) % 251)
    platform = Failing()
    return pages, SwapSpace(pages, NUM_PAGES, 6, platform, is_alone=is_alone), platform


def bytes_of(pages: KVPages) -> list[torch.Tensor]:
    return [slab.view(torch.uint8).clone() for slab in pages.slabs]


@pytest.mark.parametrize(
    ("dtype", "slab_bytes"), [(torch.float32, 48), (torch.bfloat16, 50), (torch.float8_e4m3fn, 51)], ids=str
)
@pytest.mark.parametrize("most_staged", [1 << 20, 2 * 48])
def test_all_of_a_page_goes_and_comes(
    dtype: torch.dtype, slab_bytes: int, most_staged: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap_space, "_STAGED_BYTES", most_staged)
    pages, space, _ = space_of(dtype, slab_bytes=slab_bytes)
    before = bytes_of(pages)
    assert space.apply([3, 12, 9, 13, 4, 14, 0, 10], NONE) == ([], set())
    for slab in pages.slabs:
        slab.view(torch.uint8)[[0, 3, 4, 9]] = 0
    assert space.apply([12, 5, 13, 3, 14, 4, 10, 2], NONE) == ([], set())
    for old, new in zip(before, bytes_of(pages), strict=True):
        assert torch.equal(new[[5, 3, 4, 2]], old[[3, 9, 4, 0]])
        assert torch.equal(new[[1, 6, 7, 8]], old[[1, 6, 7, 8]]) and not new[[0, 9]].any()
    assert space.num_copied == [4, 4]


def test_a_place_is_given_anew_in_the_order_of_the_copies() -> None:
    pages, space, _ = space_of()
    before = bytes_of(pages)
    assert space.apply([1, 10, 8, 7, 2, 10, 10, 5], NONE) == ([8, 7], set())
    assert all(torch.equal(new[5], old[2]) for old, new in zip(before, bytes_of(pages), strict=True))


@pytest.mark.parametrize("pairs", [[3, 16], [16, 3], [-1, 12]])
def test_no_other_memory_is_touched(pairs: list[int]) -> None:
    _, space, _ = space_of()
    with pytest.raises(InternalError, match="pages outside 0 to 15"):
        space.apply(pairs, NONE)


def test_what_did_not_arrive_is_said() -> None:
    _, space, platform = space_of()
    platform.fails = True
    assert space.apply([1, 10, 2, 11], NONE) == ([], set())
    platform.fails = False
    assert space.apply([3, 12], NONE) == ([], set())
    assert space.apply([10, 5, 12, 6, 11, 7], NONE) == ([], {5, 7})
    assert space.apply([4, 10, 10, 5], NONE) == ([], set())  # the place has another page now
    platform.fails = True
    assert space.apply([12, 6], NONE) == ([], {6})


def test_one_rank_of_several_decides_nothing_by_itself() -> None:
    _, space, platform = space_of(is_alone=False)
    platform.fails = True
    with pytest.raises(RuntimeError, match="no copy"):
        space.apply([1, 10], NONE)


class Event:
    def __init__(self) -> None:
        self.num_waits = 0

    def query(self) -> bool:
        return False

    def wait(self) -> None:
        self.num_waits += 1


class Queued(CpuPlatform):
    """Whose copies are under way for ever."""

    def __init__(self) -> None:
        self.events: list[Event] = []

    def launch(self, work: Callable[[], None], after: Any) -> Event:
        self.events.append(Event())
        return self.events[-1]


def test_only_who_needs_a_page_waits_for_it() -> None:
    platform = Queued()
    pages = KVPages(
        KVLayout((KVCacheGroup("full", 4),), (), 3, 48), NUM_PAGES, KVFormat(torch.float32), torch.device("cpu")
    )
    space = SwapSpace(pages, NUM_PAGES, 6, platform, is_alone=True)

    def waits() -> list[int]:
        return [event.num_waits for event in platform.events]

    space.apply([1, 10, 2, 11], NONE)
    space.apply([3, 12], NONE)
    space.apply([], np.array([4, 5]))
    assert waits() == [0, 0]
    space.apply([], np.array([2, 1]))  # their new owners write them
    assert waits() == [1, 0]
    space.apply([7, 3], NONE)  # it is copied over
    assert waits() == [1, 1]
    space.apply([], np.array([1, 2, 3]))
    assert waits() == [1, 1]
    space.apply([12, 8], NONE)  # the step reads it
    assert waits() == [1, 1, 1]
