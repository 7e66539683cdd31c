"""Tiny random-weight checkpoints of every architecture, written by transformers itself: config, weights, tokenizer."""

from __future__ import annotations

import json
import logging
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.overrides import TorchFunctionMode
from transformers import (
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    DeepseekV2Config,
    DeepseekV2ForCausalLM,
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Exaone4Config,
    Exaone4ForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    Glm4Config,
    Glm4ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    Glm4MoeLiteConfig,
    Glm4MoeLiteForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    GraniteConfig,
    GraniteForCausalLM,
    Lfm2Config,
    Lfm2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Olmo2Config,
    Olmo2ForCausalLM,
    Olmo3Config,
    Olmo3ForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PhiConfig,
    PhiForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5MoeForCausalLM,
    Qwen3_5MoeTextConfig,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
    SmolLM3Config,
    SmolLM3ForCausalLM,
    StableLmConfig,
    StableLmForCausalLM,
    Starcoder2Config,
    Starcoder2ForCausalLM,
)

ARCHITECTURES: dict[str, tuple[type, type]] = {
    "starcoder2": (Starcoder2Config, Starcoder2ForCausalLM),
    "stablelm": (StableLmConfig, StableLmForCausalLM),
    "phi": (PhiConfig, PhiForCausalLM),
    "cohere2": (Cohere2Config, Cohere2ForCausalLM),
    "cohere": (CohereConfig, CohereForCausalLM),
    "deepseek_v2": (DeepseekV2Config, DeepseekV2ForCausalLM),
    "deepseek_v3": (DeepseekV3Config, DeepseekV3ForCausalLM),
    "exaone4": (Exaone4Config, Exaone4ForCausalLM),
    "gemma": (GemmaConfig, GemmaForCausalLM),
    "gemma2": (Gemma2Config, Gemma2ForCausalLM),
    "gemma3": (Gemma3TextConfig, Gemma3ForCausalLM),
    "glm4": (Glm4Config, Glm4ForCausalLM),
    "glm4_moe": (Glm4MoeConfig, Glm4MoeForCausalLM),
    "glm4_moe_lite": (Glm4MoeLiteConfig, Glm4MoeLiteForCausalLM),
    "granite": (GraniteConfig, GraniteForCausalLM),
    "llama": (LlamaConfig, LlamaForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
    "olmo2": (Olmo2Config, Olmo2ForCausalLM),
    "olmo3": (Olmo3Config, Olmo3ForCausalLM),
    "phi3": (Phi3Config, Phi3ForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "gpt_oss": (GptOssConfig, GptOssForCausalLM),
    "lfm2": (Lfm2Config, Lfm2ForCausalLM),
    "qwen3_next": (Qwen3NextConfig, Qwen3NextForCausalLM),
    "qwen3_5_moe_text": (Qwen3_5MoeTextConfig, Qwen3_5MoeForCausalLM),
    "qwen3_5_text": (Qwen3_5TextConfig, Qwen3_5ForCausalLM),
    "qwen3_moe": (Qwen3MoeConfig, Qwen3MoeForCausalLM),
    "mixtral": (MixtralConfig, MixtralForCausalLM),
    "smollm3": (SmolLM3Config, SmolLM3ForCausalLM),
}
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS: dict[str, dict[str, Any]] = {
    "llama": {"tie_word_embeddings": False, "attention_bias": True, "mlp_bias": True, "rope_parameters": LLAMA3},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {"tie_word_embeddings": True},
    "qwen3_moe": {"norm_topk_prob": True},
    "gpt_oss": {"sliding_window": 7, "swiglu_limit": 1.0},
}
"""Fields with which the architectures show, between them, all that they have."""
VOCAB_SIZE = 320  # 256 bytes, then what the tokenizer calls special, then ids that it never makes
BOS, EOS = 256, 257

SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "max_position_embeddings": 256,
    "bos_token_id": BOS,
    "eos_token_id": EOS,
    "pad_token_id": None,
}


def write_tiny_model(
    folder: Path, arch: str, *, seed: int = 0, max_shard_size: str = "1GB", dtype: str = "float32", **overrides: Any
) -> Path:
    """Write a model of ``arch`` into ``folder`` and return it.

    ``overrides`` are fields of transformers' config class. The same seed and fields give the same weights.
    """
    model = make_tiny_model(arch, seed=seed, **overrides).to(getattr(torch, dtype))
    _quietly(lambda: model.save_pretrained(folder, max_shard_size=max_shard_size))
    write_tiny_tokenizer(folder)
    return folder


def make_tiny_model(arch: str, *, seed: int = 0, **overrides: Any) -> PreTrainedModel:
    config_class, model_class = ARCHITECTURES[arch]
    sizes = dict(SIZES)
    if arch in ("qwen3", "qwen3_moe"):
        sizes["head_dim"] = 16  # not hidden_size / num_attention_heads
    if arch == "qwen3_moe":
        sizes |= {"num_experts": 6, "num_experts_per_tok": 3, "moe_intermediate_size": 40}
    if arch == "mixtral":
        sizes |= {"num_local_experts": 4, "num_experts_per_tok": 2}
    if arch == "gpt_oss":  # its YaRN shows in large heads only, its MXFP4 comes in blocks of 32
        sizes |= {"num_local_experts": 5, "num_experts_per_tok": 2, "hidden_size": 64, "intermediate_size": 96}
        sizes |= {"head_dim": 64, "max_position_embeddings": 8192}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = _quietly(lambda: model_class(config_class(**{**sizes, **overrides}))).eval()
        randomise(model)
    return model


def load_reference(folder: Path, arch: str) -> PreTrainedModel:
    """transformers' own reading of the folder, in float32, with its plainest attention."""
    model_class = ARCHITECTURES[arch][1]
    return _quietly(
        lambda: model_class.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    )


class ClosestChoice(TorchFunctionMode):
    """Notes the least ``gap`` between a score that torch.topk takes and one that it leaves: routers of experts do."""

    def __init__(self) -> None:
        super().__init__()
        self.gap = math.inf

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        taken = func(*args, **(kwargs or {}))
        if func in (torch.topk, Tensor.topk):
            scores, k = args[0], taken.values.shape[-1]
            if k < scores.shape[-1]:
                last, next_ = scores.topk(k + 1).values[..., -2:].unbind(-1)
                self.gap = min(self.gap, float((last - next_).min()))
        return taken


@torch.inference_mode()
def tokens_and_logits(reference: PreTrainedModel, rng: random.Random, count: int) -> tuple[list[int], Tensor]:
    """Random tokens, and the reference's logits, float32 [count, vocab_size]. In another order of summation a token for
    which two experts are as good as each other gets the other one, and other logits: none of these is such a token."""
    while True:
        tokens = [rng.randrange(VOCAB_SIZE) for _ in range(count)]
        with ClosestChoice() as choice:
            logits = reference(torch.tensor([tokens]), use_cache=False).logits[0]
        if choice.gap > 5e-5:
            return tokens, logits


def write_tiny_tokenizer(folder: Path) -> None:
    """Every byte is a token, so that any text can be encoded; <s> and </s> beside."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={char: i for i, char in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    template = "{% for m in messages %}<s>{{ m.role }}: {{ m.content }}</s>{% endfor %}"
    settings = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": template}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def randomise(model: PreTrainedModel) -> None:
    """transformers makes norms 1, biases 0 and the rest so small that a wrong one would hardly show in the logits."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "norm" in name:
                weight.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                weight.uniform_(-0.5, 0.5)
            else:
                weight.normal_(0, 0.2)
        for name, buffer in model.named_buffers():
            if name.endswith("_bias"):  # of the scores by which experts are chosen
                buffer.uniform_(-0.2, 0.2)


def _quietly(call: Any) -> Any:
    """transformers reports missing kernels and progress; none of it concerns a test."""
    import transformers

    level = logging.getLogger("transformers").level
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    try:
        return call()
    finally:
        logging.getLogger("transformers").setLevel(level)


def tiny_models(root: Path) -> Callable[..., Path]:
    """Return ``tiny_model(arch, **overrides) -> folder``, which writes each variant once."""
    made: dict[str, Path] = {}

    def make(arch: str, **overrides: Any) -> Path:
        key = json.dumps([arch, overrides], sort_keys=True)
        if key not in made:
            made[key] = write_tiny_model(root / f"{arch}-{len(made)}", arch, **overrides)
        return made[key]

    return make
