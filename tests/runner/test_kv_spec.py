"""How what the layers keep is laid out in groups and pages."""

from __future__ import annotations

from aengine.ipc.messages import STATE_BLOCK_SIZE, KVCacheGroup
from aengine.runner.kv_spec import FullKV, LatentKV, SharedKV, StateKV, WindowKV, lay_out_kv

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
    layout = lay_out_kv([FULL, FullKV(1, 8), LatentKV(6)], 16, 2)  # 64, 32 and 12 bytes a token
    assert [group.block_size for group in layout.groups] == [16, 32, 64]
    assert layout.slab_bytes == 16 * 64 and layout.num_slabs == 1


def test_a_state_is_one_block_and_sets_the_pages_size() -> None:
    layout = lay_out_kv([StateKV(5000), FULL], 16, 2)
    assert layout.groups == (KVCacheGroup("state", STATE_BLOCK_SIZE), KVCacheGroup("full", 128))
    assert layout.slab_bytes == 128 * 64
    assert lay_out_kv([StateKV(5000)], 16, 2).slab_bytes == 5000


def test_a_layer_that_shares_is_where_the_other_is() -> None:
    layout = lay_out_kv([FULL, WINDOW, SharedKV(0), SharedKV(1)], 16, 2)
    assert layout.layers[2:] == layout.layers[:2] and len(layout.groups) == 2


def test_most_blocks_of_a_window() -> None:
    group = KVCacheGroup("window", 16, 32)
    assert [group.most_blocks(n, 64) for n in (1, 16, 17, 112, 113, 10_000)] == [1, 1, 2, 7, 7, 7]
    assert KVCacheGroup("full", 16).most_blocks(10_000, 64) == 625
    assert KVCacheGroup("state", STATE_BLOCK_SIZE).most_blocks(10_000, 64) == 1
