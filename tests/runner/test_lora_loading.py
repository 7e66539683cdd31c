"""What a loader puts into a slot, read in small pieces: factors of several types, of experts, cut among ranks."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from aengine.runner.distributed.shares import Share
from aengine.runner.lora import loading
from aengine.runner.lora.loading import LoraLoader
from aengine.runner.lora.matrices import ExpertMatrices, SlotMatrices
from aengine.runner.platforms.cpu import CpuPlatform

LAYER, RANK, OUT, IN, EXPERTS, SCALE = "model.layers.0.", 4, 6, 10, 4, 0.3


class LikeGpu(CpuPlatform):
    """Tensors are put into their places from memory of the device, each whole."""

    is_accelerator = True


@pytest.mark.parametrize("room", [100, 1000, 1 << 20])
@pytest.mark.parametrize(("platform", "piece"), [(CpuPlatform, 7), (CpuPlatform, 1 << 15), (LikeGpu, 0)])
def test_a_slot_has_what_the_file_has(
    room: int,
    platform: type[CpuPlatform],
    piece: int,
    tmp_path: Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """On the second of two ranks: rows of q and v are cut, columns of o, and of the experts it has the last."""
    monkeypatch.setattr(loading, "_ROOM", room)
    monkeypatch.setattr(loading, "_MOST_ALONE", piece)
    gen = torch.Generator().manual_seed(rng.getrandbits(60))

    def factors(out: int, columns: int, rank: int, count: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        a, b = torch.randn(count * rank, columns, generator=gen), torch.randn(out, rank * count, generator=gen)
        return a.to(dtype), b.to(dtype)

    dtypes = torch.float32, torch.float16, torch.bfloat16
    of_q, of_o = (factors(2 * OUT, IN, rank, 1, rng.choice(dtypes)) for rank in (3, RANK))
    of_up, of_down = (factors(size, IN, 2, EXPERTS, rng.choice(dtypes)) for size in (2 * OUT, OUT))
    saved = {}
    for name, (a, b) in {
        "self_attn.q_proj": of_q,
        "self_attn.o_proj": of_o,
        "mlp.experts.base_layer": of_up,
        "mlp.experts": of_down,
    }.items():
        name = f"base_model.model.{LAYER}{name}"
        saved |= {f"{name}.lora_A.weight": a, f"{name}.lora_B.weight": b}
    save_file(saved, tmp_path / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 2 * SCALE, "alpha_pattern": {"q_proj": 3, "o_proj": RANK}}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))

    cut, whole, cpu = Share(OUT, 1, 2), Share(IN), torch.device("cpu")
    plain = {"num_slots": 2, "rank": RANK, "dtype": torch.bfloat16, "device": cpu}
    qv = SlotMatrices({f"{LAYER}self_attn.{name}_proj": [cut] for name in "vq"}, [whole], **plain)  # type: ignore[arg-type]
    o = SlotMatrices({f"{LAYER}self_attn.o_proj": [Share(2 * OUT)]}, [Share(IN // 2, 1, 2)], **plain)  # type: ignore[arg-type]
    experts = Share(EXPERTS // 2, 1, 2), 2, RANK, torch.bfloat16, cpu
    names = [f"{LAYER}mlp.experts.{name}_proj" for name in ("gate", "up", "down")]
    gate_up = ExpertMatrices({name: [Share(OUT)] for name in names[:2]}, [whole], *experts)
    down = ExpertMatrices({names[2]: [Share(OUT)]}, [whole], *experts)
    for own in (qv, o, gate_up, down):  # another adapter's
        for part in own.of(1):
            part.fill_(9.0)

    LoraLoader(platform(), (RANK, RANK), 1).load(1, str(tmp_path), [qv, o, gate_up, down])

    def is_there(matrices: SlotMatrices, a: Tensor, b: Tensor, scale: float, first: int = 0) -> None:
        """``a`` [experts, rank, in], ``b`` [experts, out, rank] are there, from the row ``first`` of B on, and zeros
        beside them."""
        own_a, own_b = (part.clone() for part in matrices.of(1))
        i, rank = first // OUT, a.shape[1]
        own_a, own_b = own_a[:, i * RANK : (i + 1) * RANK], own_b[:, first : first + b.shape[1]]
        assert torch.equal(own_a[:, :rank], a.bfloat16()) and torch.equal(
            own_b[..., :rank], (b.float() * scale).bfloat16()
        )
        assert not own_a[:, rank:].any() and not own_b[..., rank:].any()

    is_there(qv, of_q[0][None], of_q[1][None, OUT:], 1.0, first=OUT)
    assert not any(part[:, :4].any() for part in qv.of(1)), "there is nothing for v"
    is_there(o, of_o[0][None, :, IN // 2 :], of_o[1][None], 1.0)
    a, b = (of_up[0].view(EXPERTS, 2, IN), of_up[1].view(2 * OUT, 2, EXPERTS).permute(2, 0, 1))
    is_there(gate_up, a[2:], b[2:, :OUT], SCALE)
    is_there(gate_up, a[2:], b[2:, OUT:], SCALE, first=OUT)
    a, b = (of_down[0].view(EXPERTS, 2, IN), of_down[1].view(OUT, 2, EXPERTS).permute(2, 0, 1))
    is_there(down, a[2:], b[2:], SCALE)
    assert not any(part[: part.shape[0] // 2].any() for own in (qv, o, gate_up, down) for part in own.tensors[:2])
