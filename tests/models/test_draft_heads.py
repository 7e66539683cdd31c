"""Heads that draft, each compared with its reference: texts in chunks and batches over paged KV, and their drafts."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from draft_heads import DFlash, DraftHead, Eagle3, Mtp, PEagle
from driver import Driver, check_near, load, no_progress, source_of
from safetensors.torch import load_file, save_file
from test_hybrids import DELTA, EXPERTS
from test_scenarios import DEEPSEEK_V3, LATENT, LATENT_YARN
from tiny import VOCAB_SIZE, load_reference
from torch import Tensor, nn

from aengine.checkpoint.source import ModelSource
from aengine.errors import ModelLoadError
from aengine.runner.models import heads
from aengine.runner.weights.sources.loader import load_weights, stored_shapes

ANY_LAYERS = {"eagle_aux_hidden_state_layer_ids": [0, 2, 3]}
DRAFTED = 100
STEPS = 3
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5000.0,
    "max_position_embeddings": 256,
}
EAGLE3 = {"architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": DRAFTED}
PEAGLE = EAGLE3 | {"num_hidden_layers": 2, "ptd_token_id": 7}
DFLASH = {
    "architectures": ["DFlashDraftModel"],
    "model_type": "qwen3",
    "num_hidden_layers": 2,
    "block_size": 8,
    "dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 1, 2]},
}
MTP = {"architectures": ["MiMoMTP"], "model_type": "mimo_mtp", "num_nextn_predict_layers": 1}


def randomise(module: nn.Module, rng: random.Random) -> None:
    """Weights that show where they are missing, as those of `tiny.randomise`."""
    torch.manual_seed(rng.randrange(2**31))
    for name, weight in module.named_parameters():
        with torch.no_grad():
            weight.uniform_(0.5, 1.5) if "norm" in name else weight.normal_(0, 0.2)


def write_head(folder: Path, head: DraftHead, **settings: Any) -> Path:
    folder.mkdir()
    tensors = {head.prefix + name: tensor.contiguous() for name, tensor in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**head.config, **settings}))
    return folder


def read_head(source: ModelSource, target: Any) -> Any:
    head = heads.build_head(source.hf_config, stored_shapes(source), target, target.weights.formats)
    load_weights(head, source, 0, no_progress)
    return head


class Fed:
    """A head as a model for `Driver`: the states come beside the ids."""

    def __init__(self, head: heads.DraftHead) -> None:
        self.head, self.config, self.weights = head, head.config, head.weights
        self.states = torch.empty(0)
        self.hidden = torch.empty(0)

    def forward(self, input_ids: Tensor, positions: Tensor, attn: Any) -> Tensor:
        before = self.states.clone()
        self.hidden = self.head.forward(input_ids, positions, attn, self.states)
        assert torch.equal(self.states, before)
        return self.hidden

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return self.head.compute_logits(hidden)


def drafts(head: heads.DraftHead, rng: random.Random, texts: list[tuple[Tensor, list[int]]]) -> list[Tensor]:
    """The logits of all pairs of each text and of those that are drafted behind it, float32 [pairs + STEPS - 1, n].

    ``texts``: the target's streams at each pair, and its token."""
    fed = Fed(head)
    driver = Driver(fed, rng)  # type: ignore[arg-type]
    found: list[list[Tensor]] = [[] for _ in texts]

    def run(batch: dict[str, list[int]], states: list[Tensor]) -> dict[str, Tensor]:
        fed.states = torch.cat(states)
        logits = driver.step(batch)
        for name, own in logits.items():
            found[int(name)].append(own)
        return dict(zip(batch, fed.hidden.split([len(ids) for ids in batch.values()])))

    streams = [head.combine(own) for own, _ in texts]
    run({"0": texts[0][1][:7]}, [streams[0][:7]])  # a chunk, before the others come
    ids = {"0": texts[0][1][7:]} | {str(i): own for i, (_, own) in enumerate(texts) if i}
    hidden = run(ids, [streams[0][7:], *streams[1:]])
    for _ in range(STEPS - 1):
        tokens = {name: head.token_ids(found[int(name)][-1][-1:].argmax(-1)).tolist() for name in ids}
        hidden = run(tokens, [head.recycled(hidden[name][-1:]) for name in ids])
    return [torch.cat(own) for own in found]


@pytest.mark.parametrize(
    ("reference", "settings"),
    [
        (Eagle3, EAGLE3 | ANY_LAYERS),
        (Eagle3, EAGLE3 | ANY_LAYERS | {"norm_before_residual": True, "attention_bias": True}),
        (Mtp, MTP | {"attention_bias": False}),
        (Mtp, MTP | {"attention_bias": True}),
    ],
)
def test_a_head_is_its_reference(
    reference: type[DraftHead],
    settings: dict[str, Any],
    tiny_model: Callable[..., Path],
    tmp_path: Path,
    rng: random.Random,
) -> None:
    target: Any = load(source_of(tiny_model("llama")))[0]
    tables = target.embed.table.float(), target.lm_head.weight.multiply(torch.eye(48)).T
    judge = reference({**SIZES, **settings}, *tables).eval()
    randomise(judge, rng)
    if isinstance(judge, Eagle3):
        judge.d2t.copy_(torch.tensor(sorted(rng.sample(range(VOCAB_SIZE), DRAFTED))) - torch.arange(DRAFTED))
    head = read_head(source_of(write_head(tmp_path / "head", judge)), target)
    assert head.captured == ((0, 2, 3) if isinstance(judge, Eagle3) else (target.config.num_layers,))
    texts = [
        (torch.randn(count, 48 * len(head.captured)), [rng.randrange(VOCAB_SIZE) for _ in range(count)])
        for count in (19, 1, 12)
    ]
    for (streams, ids), logits in zip(texts, drafts(head, rng, texts), strict=True):
        states = (
            streams
            if isinstance(judge, Eagle3)
            else target.norm.weight * nn.functional.rms_norm(streams, (48,), eps=1e-6)
        )
        with torch.inference_mode():
            wanted, tokens = judge.roll_out(states, torch.tensor(ids), STEPS)
        check_near(logits[: len(ids)], wanted[0], "logits of the text's pairs")
        check_near(logits[len(ids) :], torch.stack([one[-1] for one in wanted[1:]]), "logits of drafts")
        assert head.token_ids(logits[len(ids) - 1 :].argmax(-1)).tolist() == [int(one[-1]) for one in tokens]


QWEN = ("mtp.layers.0.", "mtp.fc", "mtp.pre_fc_norm_embedding", "mtp.pre_fc_norm_hidden", "mtp.norm")
GLM = ("model.layers.3.", *(f"model.layers.3.{name}" for name in ("eh_proj", "enorm", "hnorm", "shared_head.norm")))
GLM4_MOE = {"n_routed_experts": 8, "num_experts_per_tok": 3, "moe_intermediate_size": 24, "routed_scaling_factor": 1.5}


@pytest.mark.parametrize(
    ("arch", "own", "names"),
    [
        ("qwen3_next", {**DELTA, **EXPERTS}, QWEN),
        ("qwen3_5_text", DELTA, QWEN),
        ("glm4_moe", GLM4_MOE | {"use_qk_norm": True, "head_dim": 16}, GLM),
        ("glm4_moe_lite", LATENT | {"q_lora_rank": 24}, GLM),
        ("deepseek_v3", DEEPSEEK_V3 | {"rope_parameters": LATENT_YARN}, GLM),
    ],
)
def test_the_mtp_layer_of_a_checkpoint(
    arch: str, own: dict[str, Any], names: Sequence[str], tiny_model: Any, tmp_path: Path, rng: random.Random
) -> None:
    """The layer is transformers' own, behind a product of the paper; a state is never masked by itself, so that a text
    with its drafts is one longer text."""
    folder = tiny_model(arch, seed=7, **own, rms_norm_eps=1e-5)
    model, target = load_reference(folder, arch), load(source_of(folder))[0]
    torch.manual_seed(rng.randrange(2**31))
    layer, size, plus = model.model.layers[1], 48, names == QWEN
    at, *parts = names
    fc, norms = torch.randn(size, 2 * size) * 0.2, [torch.rand(size) - 0.5 * plus for _ in range(3)]
    before = "model.layers.1."
    layer_tensors = {name: x for name, x in load_file(folder / "model.safetensors").items() if name.startswith(before)}
    stored = {name.replace(before, at): tensor for name, tensor in layer_tensors.items()}
    stored |= {f"{name}.weight": tensor for name, tensor in zip(parts, [fc, *norms], strict=True)}
    (tmp_path / "head").mkdir()
    save_file(stored, tmp_path / "head" / "model.safetensors")
    (tmp_path / "head" / "config.json").write_text((folder / "config.json").read_text())
    head = read_head(source_of(tmp_path / "head"), target)

    def norm(index: int, x: Tensor) -> Tensor:
        return nn.functional.rms_norm(x, (size,), plus + norms[index], 1e-5)

    @torch.inference_mode()
    def judge(states: Tensor, ids: Tensor) -> Tensor:
        embedded = norm(0, model.get_input_embeddings()(ids))
        x = (torch.cat((embedded, norm(1, states)), 1) @ fc.T)[None]
        positions = torch.arange(len(ids))[None]
        mask = torch.full((len(ids), len(ids)), -torch.inf).triu(1)[None, None]
        rotary = model.model.rotary_emb(x, positions)
        out = layer(x, position_embeddings=rotary, attention_mask=mask, position_ids=positions)
        return norm(2, out[0] if isinstance(out, tuple) else out.squeeze(0))

    streams, ids = torch.randn(9, size), torch.tensor([rng.randrange(VOCAB_SIZE) for _ in range(9)])
    (logits,) = drafts(head, rng, [(streams, ids.tolist())])
    with torch.inference_mode():
        states = model.model.norm(streams)
        for step in range(STEPS):
            out = judge(states, ids)
            wanted = model.lm_head(out)
            check_near(logits[: len(ids)], wanted, f"step {step}")
            states, ids = torch.cat((states, out[-1:])), torch.cat((ids, wanted[-1:].argmax(-1)))


def test_what_a_head_lacks_is_named(tiny_model: Callable[..., Path], tmp_path: Path, rng: random.Random) -> None:
    target: Any = load(source_of(tiny_model("llama")))[0]
    tables = target.embed.table.float(), target.embed.table.float()

    def refused(name: str, change: Callable[[Any], Any] = lambda judge: None, **settings: Any) -> str:
        judge = Eagle3({**SIZES, **EAGLE3, **ANY_LAYERS}, *tables)
        change(judge)
        source = source_of(write_head(tmp_path / name, judge, **settings))
        with pytest.raises(ModelLoadError) as raised:
            read_head(source, target)
        return str(raised.value)

    assert "lacks d2t, which says what the 100 tokens that it predicts are" in refused("1", lambda h: delattr(h, "d2t"))
    assert "lacks lm_head.weight, and the target's" in refused("2", lambda h: delattr(h, "lm_head"))
    beyond = refused("3", lambda h: h.d2t.fill_(VOCAB_SIZE - 50))
    assert "d2t" in beyond and f"beyond the {VOCAB_SIZE} of the target" in beyond
    assert "vocab_size=640 is not the target's, 320: the head is another model's" in refused("4", vocab_size=640)
    assert "reads states of 64 elements" in refused("5", target_hidden_size=64)
    assert "the target has 3" in refused("6", eagle_aux_hidden_state_layer_ids=[1, 2, 3])
    assert "fc.weight" in refused("7", lambda h: setattr(h, "fc", nn.Linear(96, 48, False)))
    assert "num_hidden_layers=2 is not 1" in refused("8", num_hidden_layers=2)
    with pytest.raises(ModelLoadError, match="'bert' names no head that drafts"):
        heads.build_head({"model_type": "bert"}, None, target, target.weights.formats)


def test_what_a_head_of_one_pass_lacks_is_named(
    tiny_model: Callable[..., Path], tmp_path: Path, rng: random.Random
) -> None:
    target: Any = load(source_of(tiny_model("llama")))[0]
    tables = target.embed.table.float(), target.embed.table.float()

    def refused(name: str, settings: dict[str, Any], lacking: str = "", **changes: Any) -> str:
        judge = (DFlash if settings is DFLASH else PEagle)({**SIZES, **settings}, *tables)
        if changes.pop("is_damaged", False):
            judge.mask_hidden.data.fill_(torch.nan)
        if lacking:
            delattr(judge, lacking)
        with pytest.raises(ModelLoadError) as raised:
            read_head(source_of(write_head(tmp_path / name, judge, **changes)), target)
        return str(raised.value)

    peagle, own = PEAGLE | ANY_LAYERS, DFLASH["dflash_config"]
    assert "lacks mask_hidden, the state that its masks hold" in refused("1", peagle, "mask_hidden")
    assert "mask_hidden holds NaN" in refused("0", peagle, is_damaged=True)
    beyond = refused("2", peagle, ptd_token_id=VOCAB_SIZE)
    assert f"ptd_token_id={VOCAB_SIZE} is no token of the model that it drafts for, which has 0 to" in beyond
    assert "lacks a tensor of the model: hidden_norm.weight" in refused("3", DFLASH, "hidden_norm")
    assert "names no token that masks hold" in refused("4", DFLASH, dflash_config={**own, "mask_token_id": None})
    assert "target_layer_ids" in refused("5", DFLASH, dflash_config={"mask_token_id": 1})
    assert "the target, of 3," in refused("6", DFLASH, dflash_config={**own, "target_layer_ids": [3]})
    assert "block_size" in refused("7", DFLASH, block_size=None)
    assert "windows" in refused("8", DFLASH, layer_types=["full_attention", "sliding_attention"])
    assert "vocab_size=640 is not the target's" in refused("9", DFLASH, vocab_size=640)
    with pytest.raises(ModelLoadError, match="names no head that drafts"):
        heads.method_of({"architectures": ["DFlash2DraftModel"], "model_type": "qwen3"})


@pytest.mark.parametrize(
    ("method", "hf", "names"),
    [
        ("peagle", {"architectures": ["LlamaForCausalLMEagle3"], "ptd_token_id": 3}, ()),
        ("peagle", {"architectures": ["LlamaForCausalLMEagle3"]}, ("mask_hidden",)),
        ("peagle", {"speculators_model_type": "peagle", "mask_token_id": 3}, ()),
        ("eagle3", {"speculators_model_type": "eagle3"}, ()),
        ("dflash", {"speculators_model_type": "dflash"}, ()),
        ("dflash", {"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, ()),
        ("mtp", {"model_type": "mimo"}, ()),
    ],
)
def test_a_checkpoint_says_its_method(method: str, hf: dict[str, Any], names: tuple[str, ...]) -> None:
    assert heads.method_of(hf, names) == method


@pytest.mark.parametrize("kind", [PEagle, DFlash])
def test_the_form_of_speculators(kind: type[DraftHead], tiny_model: Callable[..., Path]) -> None:
    """The layers' settings are below a key of their own; DFlash's layers are named by where their outputs come to."""
    target: Any = load(source_of(tiny_model("llama")))[0]
    layer = {**SIZES, "model_type": "qwen3", "num_hidden_layers": 2}
    hf = {"speculators_model_type": kind.__name__.lower(), "draft_vocab_size": VOCAB_SIZE, "mask_token_id": 9}
    hf |= {"transformer_layer_config": layer, "aux_hidden_state_layer_ids": [1, 2, 3], "block_size": 8}
    head = heads.build_head(hf | ANY_LAYERS, None, target, target.weights.formats)
    assert isinstance(head, heads.OnePassHead) and head.mask_token_id == 9
    assert tuple(head.captured) == ((1, 2, 3) if kind is DFlash else (0, 2, 3))
    assert head.config.num_layers == 2 and head.vocabulary.vocab_size == VOCAB_SIZE
