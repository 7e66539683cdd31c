"""Weights from GGUF: names, the order of q's and k's rows, quantised types; SmolLM2 itself against transformers."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from driver import CPU, Driver, build, check_near, load, source_of
from gguf import GGMLQuantizationType as Q
from pairs import some
from scenarios import Engine, settings_of_torch_kept, some_prompts
from tiny import VOCAB_SIZE, make_tiny_model, tokens_and_logits, write_tiny_model
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedModel

from aengine.checkpoint.gguf_file import GgufFile
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.runner.models import read_config
from aengine.runner.platforms.cuda import CudaPlatform
from aengine.runner.startup.estimate import gguf_matrices
from aengine.runner.weights.gguf_names import EXPERT_NAMES, GgufNames
from aengine.runner.weights.quantised import gguf as quantised_gguf
from aengine.runner.weights.quantised.gguf import GgufFormat, GgufWeight
from aengine.runner.weights.sources import gguf_source
from aengine.runner.weights.sources.gguf_source import GgufMatrices
from aengine.runner.weights.sources.reading import Target
from aengine.runner.weights.weight import WeightsBelow

ARCHS = {
    "glm4": gguf.MODEL_ARCH.GLM4,
    "granite": gguf.MODEL_ARCH.GRANITE,
    "llama": gguf.MODEL_ARCH.LLAMA,
    "mistral": gguf.MODEL_ARCH.LLAMA,
    "phi3": gguf.MODEL_ARCH.PHI3,
    "qwen2": gguf.MODEL_ARCH.QWEN2,
    "qwen3": gguf.MODEL_ARCH.QWEN3,
    "smollm3": gguf.MODEL_ARCH.SMOLLM3,
    "qwen3_moe": gguf.MODEL_ARCH.QWEN3MOE,
    "lfm2": gguf.MODEL_ARCH.LFM2,
    "gpt_oss": gguf.MODEL_ARCH.GPT_OSS,
    "gemma": gguf.MODEL_ARCH.GEMMA,
    "gemma2": gguf.MODEL_ARCH.GEMMA2,
    "gemma3": gguf.MODEL_ARCH.GEMMA3,
}
GEMMA = {"query_pre_attn_scalar": 32, "sliding_window": 6}
GEMMA_ROPES = {
    "sliding_attention": {"rope_type": "default", "rope_theta": 10000.0},
    "full_attention": {"rope_type": "linear", "rope_theta": 1000000.0, "factor": 8.0},
}
# Blocks of 32 and of 256 values need rows as long as that.
SIZES: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 8, "head_dim": 32}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """What llama.cpp's converter does: row i of a head's first half, then row i of its second, and so on."""
    out = torch.empty_like(weight)
    per_head = len(weight) // heads
    for head in range(heads):
        for i in range(per_head // 2):
            out[head * per_head + 2 * i] = weight[head * per_head + i]
            out[head * per_head + 2 * i + 1] = weight[head * per_head + per_head // 2 + i]
    return out


def stored_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """Views of the parameters by their names; of experts, gate and up are tensors of their own, [experts, out, in]."""
    transposed = model.config.model_type == "gpt_oss"  # and gate and up alternate
    for name, parameter in model.named_parameters():
        weight = parameter.data.transpose(1, 2) if transposed and parameter.dim() == 3 else parameter.data
        if name.endswith("_bias"):
            name = name.removesuffix("_bias") + ".bias"
        elif "experts" in name or "sinks" in name:
            name += ".weight"
        if "experts.gate_up_proj" in name:
            halves = (weight[:, ::2], weight[:, 1::2]) if transposed else weight.chunk(2, 1)
            for part, half in zip(("gate", "up"), halves, strict=True):
                yield name.replace("gate_up", part), half
        else:
            yield name, weight


GRANITE = {
    "embedding_multiplier": 3.0,
    "logits_scaling": 2.5,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.1,
    "tie_word_embeddings": True,
}
LONGROPE = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1 + i / 16 for i in range(12)],
    "long_factor": [2 + i / 4 for i in range(12)],
    "original_max_position_embeddings": 16,  # of 20 tokens that the test has
}


def add_longrope(writer: gguf.GGUFWriter, config: Any) -> None:
    """As llama.cpp's converter for Phi-3 does."""
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    writer.add_rope_dimension_count(2 * len(rope["short_factor"]))
    writer.add_rope_scaling_orig_ctx_len(original)
    factor = config.max_position_embeddings / original
    writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(factor) / math.log(original)))
    for kind in ("long", "short"):
        writer.add_tensor(f"rope_factors_{kind}.weight", np.array(rope[f"{kind}_factor"], dtype=np.float32))


def write_gguf(
    path: Path, model: PreTrainedModel, arch: str, kinds: list[Q], *, rerank_rows: np.ndarray | None = None
) -> None:
    """``model`` as a GGUF, its matrices quantised as each of ``kinds`` in turn.

    The model then holds what the file says. Names come from the gguf package's own map. ``rerank_rows``: of the output
    matrix the file has these alone.
    """
    config = model.config
    writer = gguf.GGUFWriter(path, gguf.MODEL_ARCH_NAMES[ARCHS[arch]])
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    kinds_of_layers = getattr(config, "layer_types", None) or ()
    kv_heads = [0 if kind == "conv" else config.num_key_value_heads for kind in kinds_of_layers]
    writer.add_head_count_kv(kv_heads if 0 in kv_heads else config.num_key_value_heads)
    if 0 in kv_heads:
        writer.add_shortconv_l_cache(config.conv_L_cache)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(getattr(config, "norm_eps", None) or config.rms_norm_eps)
    rope = config.rope_parameters.get("full_attention", config.rope_parameters)
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(rope["factor"])
    if cap := getattr(config, "attn_logit_softcapping", None):
        writer.add_attn_logit_softcapping(cap)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if getattr(config, "num_local_experts", None):
        writer.add_expert_count(config.num_local_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(getattr(config, "moe_intermediate_size", config.intermediate_size))
    if arch == "granite":
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(config.rope_parameters["factor"])
        writer.add_rope_scaling_orig_ctx_len(config.rope_parameters["original_max_position_embeddings"])
    if rope.get("rope_type") == "longrope":
        add_longrope(writer, config)
    if arch == "glm4":
        writer.add_rope_dimension_count(int(config.head_dim * rope["partial_rotary_factor"]))
    names = gguf.get_tensor_name_map(ARCHS[arch], config.num_hidden_layers)
    matrices = 0
    if rerank_rows is not None:
        writer.add_pooling_type(gguf.PoolingType.RANK)
        writer.add_classifier_output_labels(["yes", "no"] if len(rerank_rows) == 2 else ["a", "b", "c"])
        writer.add_tensor("cls.output.weight", rerank_rows)
    for name, weight in stored_tensors(model):
        if rerank_rows is not None and name.startswith("lm_head"):
            continue
        stored = weight.detach() + (1 if arch.startswith("gemma") and "norm" in name else 0)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        part = name.split(".")[-2]
        permuted = arch in ("granite", "llama", "mistral", "smollm3") and part in heads
        if permuted:
            stored = interleaved(stored, heads[part])
        kind = Q.F32
        if name.endswith("conv.conv.weight"):
            stored = stored.squeeze(1)
        elif weight.dim() >= 2 and not name.endswith("bias"):
            kind, matrices = kinds[matrices % len(kinds)], matrices + 1
        data = gguf.quants.quantize(stored.contiguous().numpy(), kind)
        writer.add_tensor(names.get_name(name, (".weight", ".bias")), data, raw_dtype=kind)
        read_back = torch.from_numpy(gguf.quants.dequantize(data, kind).reshape(stored.shape).copy()).view(weight.shape)
        if permuted:  # undone by its definition, one row at a time
            order = interleaved(torch.arange(len(weight))[:, None], heads[part])[:, 0]
            read_back = torch.empty_like(read_back).index_copy_(0, order, read_back)
        if arch.startswith("gemma") and "norm" in name:
            read_back = read_back - 1
        weight.copy_(read_back)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.mark.parametrize(
    ("arch", "overrides", "kinds"),
    [
        ("llama", {}, [Q.F32]),
        ("llama", {"tie_word_embeddings": True}, [Q.Q4_1, Q.Q8_0]),
        ("llama", {"attention_bias": True}, [Q.F16, Q.BF16]),
        ("mistral", {"sliding_window": 6}, [Q.Q5_0, Q.Q5_1, Q.Q4_0]),
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}, [Q.Q8_0, Q.F32]),
        ("granite", GRANITE, [Q.Q8_0]),
        ("glm4", {}, [Q.Q8_0, Q.F32]),
        ("smollm3", {"num_hidden_layers": 4}, [Q.Q8_0]),
        ("qwen2", {}, [Q.Q8_0]),
        ("qwen3", {}, [Q.Q4_0, Q.F32, Q.TQ2_0]),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"], "block_auto_adjust_ff_dim": False}, [Q.Q8_0]),
        ("qwen3_moe", {"norm_topk_prob": True, "moe_intermediate_size": 64}, [Q.Q8_0, Q.F32, Q.Q4_0]),
        ("gpt_oss", {"sliding_window": 7}, [Q.F32, Q.Q8_0]),
        ("gemma", {}, [Q.F32]),
        ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}, [Q.F32, Q.Q8_0]),
        ("gemma3", {**GEMMA, "num_hidden_layers": 6, "rope_parameters": GEMMA_ROPES}, [Q.F32, Q.Q8_0]),
    ],
)
def test_against_transformers(
    arch: str, overrides: dict[str, Any], kinds: list[Q], tmp_path: Path, rng: random.Random
) -> None:
    reference = make_tiny_model(arch, seed=rng.getrandbits(30), **SIZES, **overrides)
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() >= 2:
                weight.mul_(0.3)
    path = tmp_path / "tiny.gguf"
    write_gguf(path, reference, arch, kinds)
    source = source_of(path)
    assert source.hf_config["gguf_architecture"] == gguf.MODEL_ARCH_NAMES[ARCHS[arch]]
    model, loaded = load(source)
    assert loaded.num_parameters == sum(p.numel() for p in reference.parameters())
    tokens, wanted = tokens_and_logits(reference, rng, 20)
    logits = Driver(model, rng).step({"a": tokens})["a"]
    check_near(logits, wanted)


@pytest.mark.parametrize(
    ("arch", "overrides", "kinds"),
    [
        ("llama", {"attention_bias": True}, [Q.Q4_0, Q.Q8_0]),  # rows of q and k are reordered
        ("llama", {"tie_word_embeddings": True}, [Q.Q4_1, Q.F32, Q.Q8_0]),
        ("phi3", {"original_max_position_embeddings": 16, "rope_parameters": LONGROPE}, [Q.Q8_0, Q.Q5_0]),
        ("gemma2", {**GEMMA, "attn_logit_softcapping": 2.0}, [Q.Q5_1, Q.TQ2_0]),
    ],
)
@pytest.mark.parametrize("dtype", ["float32", "auto"])
def test_each_matrix_is_kept_in_its_own_type(
    arch: str,
    overrides: dict[str, Any],
    kinds: list[Q],
    dtype: str,
    tmp_path: Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(quantised_gguf, "_NUMBERS_AT_ONCE", 3000)  # some rows, and a rest
    reference = make_tiny_model(arch, seed=rng.getrandbits(30), **SIZES, **overrides)
    with torch.no_grad():
        for weight in reference.parameters():
            if weight.dim() >= 2:
                weight.mul_(0.3)
        write_gguf(tmp_path / "tiny.gguf", reference, arch, kinds)
    source = source_of(tmp_path / "tiny.gguf")
    packed = GgufMatrices.of_file(source.path, build(source).gguf)
    kept, loaded = load(source, dtype, packed=packed)
    assert loaded.num_parameters == sum(p.numel() for p in reference.parameters())
    assert {form.type_code for form in packed.formats.values()} == set(kinds) - {Q.F32}
    qkv = kept.layers[0].attention.qkv.weight  # type: ignore[attr-defined]
    parts = qkv.parts if isinstance(qkv, WeightsBelow) else [qkv]
    assert any(isinstance(part, GgufWeight) and part._blocks.dtype == torch.uint8 for part in parts)
    tokens = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens]), use_cache=False).logits[0]
    logits = Driver(kept, rng).step({"a": tokens})["a"]
    if dtype == "float32":
        check_near(logits, wanted)
    else:  # what is not quantised is kept in float16
        torch.testing.assert_close(logits, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def test_the_setting_keeps_them(tmp_path: Path) -> None:
    with settings_of_torch_kept():
        reference = make_tiny_model("llama", **SIZES)
        with torch.no_grad():
            write_gguf(tmp_path / "tiny.gguf", reference, "llama", [Q.Q4_0, Q.Q8_0])
        kept, plain = (Engine(tmp_path / "tiny.gguf", quantization=how) for how in ("gguf", "auto"))
        assert kept.offer["weight_format"] == "q4_0, q8_0" and plain.offer["weight_format"] == "float32"
        prompts = some_prompts(VOCAB_SIZE)
        outputs = []
        for engine in (kept, plain):
            engine.begin()
            outputs.append(engine.generate(prompts))
        assert outputs[0] == outputs[1]
        with pytest.raises(ModelLoadError, match=r"quantization='gguf': .* is no \.gguf file"):
            Engine(write_tiny_model(tmp_path / "folder", "llama"), quantization="gguf")


def test_a_gpu_keeps_the_types_that_it_multiplies_unless_a_dtype_is_set(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    with settings_of_torch_kept(), torch.no_grad():
        write_gguf(path, make_tiny_model("llama", **SIZES), "llama", [Q.Q4_0, Q.Q8_0])
    source, gpu = source_of(path), CudaPlatform(torch.device("cuda", 0), "G", (9, 0))

    def kept(**settings: Any) -> GgufMatrices | None:
        return gguf_matrices(EngineConfig.create(str(path), settings), source, read_config(source.hf_config), gpu)

    assert (matrices := kept()) is not None and matrices.name == "q4_0, q8_0"
    assert kept(dtype="bfloat16") is None
    assert kept(dtype="bfloat16", quantization="gguf") == matrices


def test_a_kept_type_that_can_not_be_dequantised_is_named() -> None:
    form = GgufFormat(int(Q.Q8_K))
    (stored,) = form.tensors(4, 256, False)
    with pytest.raises(ModelLoadError, match="q8_k"):
        form.make({"weight": torch.zeros(stored.shape, dtype=stored.dtype)})


def test_a_part_of_a_head_turns_only_where_rows_are_not_reordered(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny_model("llama", **SIZES), "llama", [Q.F32])
    source = source_of(path)
    source.hf_config["partial_rotary_factor"] = 0.5
    with pytest.raises(ModelLoadError, match="rope.dimension_count is less than the head's size, 32"):
        load(source)


def test_a_type_that_can_not_be_dequantised_is_named(tmp_path: Path) -> None:
    path = tmp_path / "odd.gguf"
    reference = make_tiny_model("llama", **SIZES)
    write_gguf(path, reference, "llama", [Q.F32])
    file = GgufFile(path)
    with pytest.MonkeyPatch.context() as patch:
        tensor = file.tensors["blk.0.attn_q.weight"]
        odd = replace(tensor, type=tensor.type._replace(name="Q8_K"), type_code=int(Q.Q8_K))
        patch.setitem(file.tensors, tensor.name, odd)
        patch.setattr(file, "tensor_data", lambda name: np.zeros((256, 292), np.uint8))
        with pytest.raises(ModelLoadError, match=r"blk\.0\.attn_q\.weight is quantised as Q8_K"):
            gguf_source._dequantise(file, tensor.name)


def test_only_a_few_tensors_are_read_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A consumer that takes its time must not find the whole model dequantised in memory."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, make_tiny_model("llama", num_hidden_layers=12, **SIZES), "llama", [Q.F32])
    begun: list[str] = []
    dequantise = gguf_source._dequantise

    def counted(file: GgufFile, name: str, expert: int | None) -> torch.Tensor:
        begun.append(name)
        return dequantise(file, name, expert)

    monkeypatch.setattr(gguf_source, "_dequantise", counted)
    source = source_of(path)
    model, _ = load(source)
    total = len(begun)
    begun.clear()
    target = Target({name: own[0] for name, own in model.weights.places.items()}, CPU)
    tensors, _ = gguf_source.read_gguf(source.path, model.gguf, model.config.head_dim, target)
    next(iter(tensors))
    count = -1
    while count != len(begun):  # until the threads have come to rest
        count = len(begun)
        time.sleep(0.1)
    tensors.close()  # type: ignore[attr-defined]
    assert count <= 8, f"{count} of {total} tensors were read ahead of the first"


def smollm2_reference(path: str, settings: dict[str, Any]) -> PreTrainedModel:
    """transformers' Llama with the file's weights, read by the gguf package alone."""
    config = LlamaConfig(**settings)
    model = LlamaForCausalLM(config).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, config.num_hidden_layers)
    reader = {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, weight in model.named_parameters():
        tensor = reader.pop(names.get_name(name, (".weight",)))
        data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy()).reshape(weight.shape)
        part = name.split(".")[-2]
        if part in heads:
            order = interleaved(torch.arange(len(data))[:, None], heads[part])[:, 0]
            data = torch.empty_like(data).index_copy_(0, order, data)
        weight.data = data
    assert all(int(name.split(".")[1]) >= config.num_hidden_layers for name in reader)
    return model


@pytest.mark.slow
@pytest.mark.parametrize("num_layers", some([3, 30], 3))
def test_smollm2(rng: random.Random, short_model: str, num_layers: int) -> None:
    """Logits of a prompt, then 32 greedy tokens, one by one through the paged cache."""
    source = source_of("smollm2-135m" if num_layers == 30 else short_model)
    model, loaded = load(source)
    reference = smollm2_reference(source.path, source.hf_config)
    assert loaded.num_parameters == reference.num_parameters() == 28_312_128 + 3_540_096 * num_layers
    driver = Driver(model, rng, block_size=16, num_blocks=16)
    tokens = [rng.randrange(1000, 49152) for _ in range(24)]
    logits = driver.step({"a": tokens})["a"]
    with torch.inference_mode():
        torch.testing.assert_close(logits, reference(torch.tensor([tokens])).logits[0], rtol=1e-4, atol=2e-3)
    for _ in range(32):
        tokens.append(int(logits[-1].argmax()))
        logits = driver.step({"a": tokens[-1:]})["a"]
    with torch.inference_mode():
        wanted = reference(torch.tensor([tokens])).logits[0]
    for place in range(24, len(tokens)):
        best = wanted[place - 1].max()
        # By induction the tokens are transformers' own greedy ones, but where two are as good as equal.
        assert best - wanted[place - 1, tokens[place]] < 1e-3, f"token {place}"
    torch.testing.assert_close(logits[0], wanted[-1], rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize(
    "name",
    ["{0:>2000000000}{}.weight", "x{}{y}.weight", "blk.{}.attn_q.weight", "blk.0.weight", "blk..weight", "blk.0.attn_q",
     "blk.0.{}.weight", "weight", ""],
)  # fmt: skip
def test_a_tensors_name_is_no_format(name: str) -> None:
    """Nor need it have parts: what is no name of the family's is left as it is."""
    names = GgufNames(layer=EXPERT_NAMES)
    assert names.hf_name(name) == name
    assert not names.is_interleaved(name)


def test_a_stack_of_experts_is_named_by_what_is_around_its_number() -> None:
    names = GgufNames(layer=EXPERT_NAMES)
    assert names.hf_name("blk.3.ffn_up_exps.weight") == ("model.layers.3.mlp.experts.", ".up_proj.weight")
    assert names.hf_name("blk.3.attn_q.bias") == "model.layers.3.self_attn.q_proj.bias"
    assert names.name_in_file("model.layers.3.mlp.experts.17.up_proj.weight") == "blk.3.ffn_up_exps.weight"
    for name in ("blk.3.attn_q.bias", "token_embd.weight", "output_norm.weight", "odd", "model.layers.3.odd.weight"):
        assert names.name_in_file(str(names.hf_name(name))) == name


def test_errors_name_the_file_its_keys_and_its_tensors(tmp_path: Path) -> None:
    whole, path = tmp_path / "whole.gguf", tmp_path / "m.gguf"
    write_gguf(whole, make_tiny_model("qwen3_moe", moe_intermediate_size=64, **SIZES), "qwen3_moe", [Q.Q8_0])
    data = whole.read_bytes()

    def refused(changed: bytes, message: str) -> None:
        path.write_bytes(changed)
        with pytest.raises(ModelLoadError, match=rf"^.*/m.gguf(:| lacks) .*{message}"):
            Engine(path, dtype="auto")

    def with_number(key: bytes, value: int) -> bytes:
        place = data.index(key) + len(key) + 4
        return data[:place] + value.to_bytes(4, "little") + data[place + 4 :]

    metadata = "the metadata and the tensors of the file are not of one model: get the file again"
    refused(with_number(b".expert_used_count", 99), r"qwen3moe\.expert_used_count=99 is more than the 6 experts")
    refused(with_number(b".block_count", 2), "block_count is 2, and the file has tensors of 3 layers")
    refused(
        with_number(b".embedding_length", 512),
        rf"token_embd\.weight has the shape \[256, {VOCAB_SIZE}\], but by the metadata it is "
        rf"\[512, {VOCAB_SIZE}\]; {metadata}",
    )
    refused(with_number(b".expert_count", 5), r"blk\.0\.ffn_gate_inp\.weight has the shape \[256, 6\].* \[256, 5\]")
    renamed = data.replace(b"blk.1.attn_q.weight", b"blk.1.attn_x.weight")
    refused(renamed, rf"a tensor of the model: blk\.1\.attn_q\.weight; {metadata}")


class OddFile:
    """A file of one tensor of an odd shape, whose numbers nobody reads."""

    path = "odd.gguf"

    def __init__(self, name: str, *shape: int) -> None:
        self.tensors = {name: SimpleNamespace(shape=shape)}


def test_a_stack_of_more_experts_than_any_model_has() -> None:
    names = GgufNames(layer=EXPERT_NAMES)
    for count in (2**14, 2**14 + 1):
        read = gguf_source._read(OddFile("blk.0.ffn_up_exps.weight", count, 2, 2), names, 8, Target({}, CPU))  # type: ignore[arg-type]
        if count == 2**14:
            assert next(iter(read)).name == "model.layers.0.mlp.experts.0.up_proj.weight"
        else:
            with pytest.raises(ModelLoadError, match=r"odd.gguf: tensor blk.0.ffn_up_exps.weight is a stack of 16385"):
                next(iter(read))


def test_rows_that_heads_do_not_divide_are_the_loaders_to_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gguf_source, "_dequantise", lambda *_: torch.zeros(10, 4))
    names, hf_name = GgufNames(interleaved=("q_proj",)), "model.layers.0.self_attn.q_proj.weight"
    target = Target({hf_name: SimpleNamespace(shape=(16, 4), dtype=torch.float32, part=None)}, CPU)  # type: ignore[dict-item]
    (named,) = gguf_source._read(OddFile("blk.0.attn_q.weight", 10, 4), names, 8, target)  # type: ignore[arg-type]
    assert (named.name, named.shape) == (hf_name, (10, 4))
