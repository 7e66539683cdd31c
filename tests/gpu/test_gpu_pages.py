"""Pages copied aside into pinned memory, and back, on a stream of their own: no page is lost, late or early."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from gpu_models import DEVICE
from scenarios import check_scenarios
from test_hybrids import MODELS
from tiny import load_reference, write_tiny_model

from aengine.ipc.messages import KVCacheGroup
from aengine.runner.attention.kv_format import KVFormat
from aengine.runner.attention.kv_pages import KVPages
from aengine.runner.attention.swap_space import SwapSpace
from aengine.runner.kv_spec import KVLayout
from aengine.runner.platforms.choice import choose_platform

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("reference_by_torch")]


@pytest.mark.parametrize("name", ["qwen3", "gemma2", "qwen3-next"])
def test_every_scenario(name: str, tmp_path: Path) -> None:
    """Preempted requests come back from the host's memory: transformers' tokens in float32."""
    arch, fields = MODELS.get(name, (name, {"sliding_window": 9} if name == "gemma2" else {}))
    folder = write_tiny_model(tmp_path, arch, seed=7, **fields)
    reference = load_reference(folder, arch).to(DEVICE)
    engine = check_scenarios(folder, reference, device=DEVICE, max_num_batched_tokens=256, swap_space_bytes=1 << 24)
    assert engine.num_restored


@pytest.mark.parametrize("num_rows", [64, 3000])
def test_a_page_is_written_anew_only_when_its_copy_is_done(num_rows: int) -> None:
    """Each page is overwritten right after its copy was queued, and read right after the way back was: what the side
    stream and the device's own do meanwhile shows in no page. The larger copies take some milliseconds."""
    platform = choose_platform(DEVICE)
    platform.open()
    layout = KVLayout((KVCacheGroup("full", 16),), (), 4, 1 << 16)
    pages = KVPages(layout, num_rows, KVFormat(torch.bfloat16), platform.device)
    space = SwapSpace(pages, num_rows, num_rows, platform, is_alone=True)
    order = torch.randperm(num_rows).tolist()  # single pages, and few runs of them
    fresh, none = torch.arange(num_rows).numpy(), torch.arange(0).numpy()
    for turn in range(3):
        before = [slab.copy_(torch.randn_like(slab)).clone() for slab in pages.slabs]
        aside = [number for place, page in enumerate(order) for number in (page, num_rows + place)]
        assert space.apply(aside, fresh) == ([], set())
        for slab in pages.slabs:
            slab.fill_(turn)
        back = [number for place, page in enumerate(order) for number in (num_rows + place, page)]
        assert space.apply(back, none) == ([], set())
        copies = [slab.clone() for slab in pages.slabs]
        assert all(torch.equal(*pair) for pair in zip(before, copies, strict=True))
    assert space.num_copied == [3 * num_rows, 3 * num_rows]
