"""How what the layers keep is laid out in groups and pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from aengine.ipc.messages import STATE_BLOCK_SIZE, KVCacheGroup
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.kv_pages import KVPages
from aengine.runner.kv_spec import FullKV, KVLayout, LatentKV, SharedKV, StateKV, StateTensor, WindowKV, lay_out_kv

FULL = FullKV(num_kv_heads=2, head_dim=8)
WINDOW = WindowKV(num_kv_heads=2, head_dim=8, window=32)


def test_layers_alike_are_one_group_with_a_slab_each() -> None:
    layout = lay_out_kv([FULL] * 5, 16, 4)
    assert layout.groups == (KVCacheGroup("full", 16),)
    assert [(place.group, place.slab) for place in layout.layers] == [(0, i) for i in range(5)]
    assert layout.page_bytes == 5 * 16 * 2 * 2 * 8 * 4


def test_full_and_windowed_layers_share_the_slabs() -> None:
    layout = lay_out_kv([FULL, WINDOW] * 3, 16, 2)
    assert layout.groups == (KVCacheGroup("full", 16), KVCacheGroup("window", 16, 32))
    assert [(place.group, place.slab) for place in layout.layers] == [(0, 0), (1, 0), (0, 1), (1, 1), (0, 2), (1, 2)]
    assert layout.num_slabs == 3


def test_many_windows_to_a_full_layer_become_several_groups() -> None:
    layout = lay_out_kv([*[WINDOW] * 5, FULL] * 4, 16, 2)  # 20 windowed, 4 full
    assert [group.kind for group in layout.groups] == ["window"] * 4 + ["full"]
    assert layout.num_slabs == 5, "one of 25 places stays empty: less to look up than six groups of 4"
    places = [(place.group, place.slab) for place in layout.layers]
    assert len(set(places)) == 24, "two layers in one place"


def test_few_slabs_stay_empty() -> None:
    layout = lay_out_kv([WINDOW] * 52 + [FULL] * 10, 16, 2)
    assert len(layout.groups) == 5 and layout.num_slabs == 13


def test_a_layer_with_fewer_bytes_has_more_tokens_in_a_block() -> None:
    layout = lay_out_kv([FULL, FullKV(1, 8), FullKV(1, 3)], 16, 2)  # 64, 32 and 12 bytes a token
    assert [group.block_size for group in layout.groups] == [16, 32, 64]
    assert layout.slab_bytes == 16 * 64 and layout.num_slabs == 1


def test_latents_are_kept_once() -> None:
    """DeepSeek's, in 16 bits: 1,152 bytes a layer and token. Keys and values are the same memory."""
    layout = lay_out_kv([LatentKV(1, 576, 512)] * 3, 16, 2)
    assert layout.groups == (KVCacheGroup("full", 16),) and layout.page_bytes == 3 * 16 * 1152
    for heads_first in (False, True):
        pages = KVPages(layout, 4, KVFormat(torch.bfloat16), torch.device("cpu"))
        cache = pages.layers(heads_first=heads_first)[1].cache
        assert cache.shape == (4, 16, 2, 1, 576)
        cache[2, 5, 0] = 3.0
        assert (cache[2, 5, 1] == 3.0).all() and cache.sum() == 2 * 3 * 576


def state(num_floats: int) -> StateKV:
    return StateKV((StateTensor("state", (num_floats,)),))


def test_a_state_is_one_block_and_sets_the_pages_size() -> None:
    layout = lay_out_kv([state(1280), FULL], 16, 2)  # 5120 bytes
    assert layout.groups == (KVCacheGroup("state", STATE_BLOCK_SIZE), KVCacheGroup("full", 80))
    assert layout.slab_bytes == 80 * 64
    assert lay_out_kv([state(1280)], 16, 2).slab_bytes == 5120


def test_small_states_lie_behind_each_other() -> None:
    layout = lay_out_kv([state(128)] * 4 + [FULL] * 2, 16, 2)  # of 512 bytes, in slabs of 1024
    assert [group.kind for group in layout.groups] == ["state", "full"] and layout.num_slabs == 2
    assert [(place.slab, place.first_byte) for place in layout.layers[:4]] == [(0, 0), (1, 0), (0, 512), (1, 512)]


def check_layout(layers: list[FullKV | StateKV], most_waste: float) -> KVLayout:
    """No byte of a page has two layers, and little of it none."""
    layout = lay_out_kv(layers, 16, 2)
    taken: dict[tuple[int, int], list[tuple[int, int]]] = {}
    for place in layout.layers:
        size = layout.groups[place.group].block_size
        kv = place.kv
        num_bytes = kv.num_bytes if isinstance(kv, StateKV) else 2 * kv.num_kv_heads * kv.head_dim * 2 * size
        assert place.slab < layout.num_slabs and place.first_byte + num_bytes <= layout.slab_bytes
        taken.setdefault((place.group, place.slab), []).append((place.first_byte, place.first_byte + num_bytes))
    for own in taken.values():
        own.sort()
        assert all(end <= begin for (_, end), (begin, _) in pairwise(own))
    for kind in ("state", "full"):
        used = sum(end - begin for (g, _), own in taken.items() for begin, end in own if layout.groups[g].kind == kind)
        num_groups = sum(group.kind == kind for group in layout.groups)
        assert used >= (1 - most_waste) * num_groups * layout.page_bytes, kind
    return layout


@pytest.mark.parametrize("num_value_heads", [16, 32, 48, 64])
@pytest.mark.parametrize("num_layers", [24, 36, 48, 64])
def test_large_states_waste_little(num_layers: int, num_value_heads: int) -> None:
    """Qwen3-Next's and Qwen3.5's sizes: of four layers one attends, the others keep a matrix a head."""
    recurrent = StateTensor("recurrent", (num_value_heads, 128, 128))
    kept = StateKV((StateTensor("convolution", (3, 4096 + 128 * num_value_heads)), recurrent))
    layers = [FullKV(2, 256) if i % 4 == 3 else kept for i in range(num_layers)]
    layout = check_layout(layers, most_waste=1 / 8)
    (block_size,) = {group.block_size for group in layout.groups if group.kind == "full"}
    states = sum(kv.num_bytes for kv in layers if isinstance(kv, StateKV))
    assert block_size / 2 * 2 * 2 * 256 * 2 * (num_layers // 4) <= states / 8, "what half a block wastes"


def test_a_layer_that_shares_is_where_the_other_is() -> None:
    layout = lay_out_kv([FULL, WINDOW, SharedKV(0), SharedKV(1)], 16, 2)
    assert layout.layers[2:] == layout.layers[:2] and len(layout.groups) == 2


def test_most_blocks_of_a_window() -> None:
    group = KVCacheGroup("window", 16, 32)
    assert [group.most_blocks(n, 64) for n in (1, 16, 17, 112, 113, 10_000)] == [1, 1, 2, 7, 7, 7]
    assert KVCacheGroup("full", 16).most_blocks(10_000, 64) == 625
    assert KVCacheGroup("state", STATE_BLOCK_SIZE).most_blocks(10_000, 64) == 1
