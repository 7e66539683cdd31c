"""batch_invariant=True: the bits of a request's logits depend on nothing but the request."""

from __future__ import annotations

import random
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from driver import Driver, check_near, load, source_of
from scenarios import Engine, reference_of, settings_of_torch_kept, some_prompts
from test_prompt_logprobs import Scores
from test_scenarios import DEEPSEEK_V3, GRANITE
from tiny import load_reference

from aengine.config import EngineConfig
from aengine.engine.streams.prompt_logprobs import of_pieces
from aengine.errors import ModelLoadError
from aengine.kernels.cpu.compiler.target import unavailable
from aengine.kernels.policy import KernelPolicy
from aengine.runner.models import read_config
from aengine.runner.platforms.cuda import CudaPlatform
from aengine.runner.startup.policy import choose_policy
from aengine.runner.weights.compiled import CompiledWeight
from aengine.runner.weights.invariant import InOrderFormat, invariant_format
from aengine.runner.weights.plain import PlainFormat
from aengine.runner.weights.quantised.fp8 import MadeFp8Format
from aengine.runner.weights.weight import NotMultiplied

TinyModel = Callable[..., Path]
INVARIANT = KernelPolicy(batch_invariant=True)
MODELS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("llama", {"hidden_size": 96, "intermediate_size": 180, "attention_bias": True}, "float32"),
    "llama-auto": ("llama", {}, "auto"),
    "llama-bfloat16": ("llama", {}, "bfloat16"),
    "gemma2": ("gemma2", {"head_dim": 16, "sliding_window": 9, "attn_logit_softcapping": 2.0}, "float32"),
    "granite-bfloat16": ("granite", GRANITE, "bfloat16"),
    "qwen3": ("qwen3", {"tie_word_embeddings": True}, "float32"),
    "qwen3_moe": ("qwen3_moe", {}, "float32"),
    "mixtral-auto": ("mixtral", {"head_dim": 16}, "auto"),
    "gpt_oss": ("gpt_oss", {"sliding_window": 7}, "float32"),
}
EXPERTS = {"qwen3_moe", "mixtral", "gpt_oss"}
needs_compiler = pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))


def ids(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(3, 90) for _ in range(count)]


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=needs_compiler if MODELS[name][0] in EXPERTS else ()) for name in MODELS]
)
def test_logits_have_the_same_bits_alone_and_in_any_batch(name: str, tiny_model: TinyModel, rng: random.Random) -> None:
    arch, fields, dtype = MODELS[name]
    folder = tiny_model(arch, seed=7, **fields)
    model, _ = load(source_of(folder), dtype, policy=INVARIANT, is_compiled=arch in EXPERTS)
    prompt = ids(rng, 150)  # keys of two blocks
    alone = Driver(model, rng, num_blocks=512).step({"a": prompt})["a"]
    if dtype == "float32":
        with torch.inference_mode():
            check_near(alone, load_reference(folder, arch)(torch.tensor([prompt])).logits[0])
    driver, found, left = Driver(model, rng, num_blocks=2048), [], prompt
    while left:
        # Chunks of any length, one token among them, before and behind others that decode or begin; decodes come first.
        size = rng.choice([1, 1, 2, 7, 30])
        others = {f"b{i}": ids(rng, rng.choice([1, 1, 3, 40]) if rng.random() < 0.3 else 1) for i in range(4)}
        batch = dict(sorted((others | {"a": left[:size]}).items(), key=lambda item: len(item[1])))
        found.append(driver.step(batch)["a"])
        left = left[size:]
    assert torch.equal(torch.cat(found), alone)


@pytest.mark.parametrize("arch", ["llama", pytest.param("qwen3_moe", marks=needs_compiler)])
def test_tokens_are_those_of_the_request_alone(arch: str, tiny_model: TinyModel) -> None:
    """Through the scheduler: alone, batched, and chunked in a pool so small that requests are preempted, so that what
    was computed token by token is computed again as a prompt."""
    with settings_of_torch_kept():
        engine = Engine(tiny_model(arch, seed=7), batch_invariant=True)
        texts = some_prompts(engine.offer["vocab_size"])
        prompts = [text[i : i + 3] for i, text in enumerate(texts[-3:] * 2)] + texts
        outcomes = []
        engine.begin()
        outcomes.append([engine.generate([prompt])[0] for prompt in prompts])
        engine.begin()
        outcomes.append(engine.generate(prompts))
        engine.begin(num_blocks=engine.fewest_blocks(72, 16) + 2, max_num_batched_tokens=16)
        outcomes.append(engine.generate(prompts))
        assert engine.scheduler.rows.num_preemptions > 0
    assert outcomes[0] == outcomes[1] == outcomes[2]


@pytest.mark.parametrize("is_taped", [True, False])
@pytest.mark.parametrize(
    ("arch", "fields"),
    [
        pytest.param("gpt_oss", {"sliding_window": 128}, marks=needs_compiler),
        ("gemma3", {"sliding_window": 40}),
        ("mistral", {"sliding_window": 100, "head_dim": 16}),
    ],
)
def test_prompts_longer_than_a_window_have_one_result(
    arch: str, fields: dict[str, Any], is_taped: bool, tiny_model: TinyModel, rng: random.Random
) -> None:
    """Through the scheduler and the runner, which leave out the blocks that no query of a step looks at; where it is
    not taped, with the attention that the stages of a pipeline have."""
    with settings_of_torch_kept():
        folder = tiny_model(arch, seed=3, **fields)
        engine = Engine(folder, batch_invariant=True, max_model_len=192, enforce_eager=not is_taped)
        prompts, outcomes = [ids(rng, 150), ids(rng, 131), ids(rng, 70)], []
        for step_tokens in (512, 7, 33, 40):
            engine.begin(max_num_batched_tokens=step_tokens)
            asked = Scores(engine, reference_of(None))
            requests = [asked.add(prompt, 0, 8) for prompt in prompts]
            engine.run()
            outcomes.append([list(of_pieces(engine.numbers[one], one.num_prompt_tokens)) for one in requests])
    assert outcomes[1:] == [outcomes[0]] * 3


@pytest.mark.parametrize(
    ("arch", "fields", "settings", "reason"),
    [
        pytest.param(
            "mixtral", {}, {"dtype": "bfloat16"}, "dtype='bfloat16' .* use dtype='auto'", marks=needs_compiler
        ),
        ("llama", {}, {"model_impl": "transformers"}, "'llama' is computed by transformers"),
        ("qwen3_next", {}, {}, "recurrent layers"),
        ("deepseek_v3", DEEPSEEK_V3, {}, "head by head"),
        ("lfm2", {"layer_types": ["conv", "full_attention", "conv"]}, {}, "short convolutions"),
    ],
)
def test_what_has_no_such_variant_is_refused(
    arch: str, fields: dict[str, Any], settings: dict[str, Any], reason: str, tiny_model: TinyModel
) -> None:
    with settings_of_torch_kept(), pytest.raises(ModelLoadError, match=f"batch_invariant=True: .*{reason}.*False"):
        Engine(tiny_model(arch, **fields), batch_invariant=True, **settings)


@pytest.mark.parametrize(
    ("settings", "capability", "reason"),
    [
        ({}, (9, 0), ""),
        ({}, (8, 0), "G has no kernels"),
        ({"dtype": "float32"}, (9, 0), "float32"),
        ({"kv_cache_dtype": "fp8"}, (9, 0), "kv_cache_dtype='fp8'"),
        ({"attention_backend": "cudnn"}, (9, 0), "attention_backend='cudnn'"),
    ],
)
def test_what_a_gpu_is_asked_for(
    settings: dict[str, Any], capability: tuple[int, int], reason: str, tiny_model: TinyModel
) -> None:
    source = source_of(tiny_model("qwen3_moe", seed=7))
    config = EngineConfig.create(source.path, {"batch_invariant": True, **settings})
    gpu = CudaPlatform(torch.device("cuda", 0), "G", capability)
    dtype = gpu.choose_dtype(config.dtype, "bfloat16")
    if not reason:
        assert choose_policy(config, read_config(source.hf_config), gpu, dtype) == INVARIANT
        return
    with pytest.raises(
        ModelLoadError, match=f"batch_invariant=True: .*{re.escape(reason)}.*: .*, or leave batch_invariant"
    ):
        choose_policy(config, read_config(source.hf_config), gpu, dtype)


def test_weights_of_a_gpu_are_plain_numbers() -> None:
    device = torch.device("cuda")
    assert isinstance(invariant_format(PlainFormat(torch.bfloat16), "q_proj", INVARIANT, device), InOrderFormat)
    with pytest.raises(NotMultiplied, match="multiple of 8"):
        InOrderFormat(torch.bfloat16).tensors(16, 12, False)
    with pytest.raises(ModelLoadError, match="batch_invariant=True: q_proj is in fp8"):
        invariant_format(MadeFp8Format(PlainFormat(torch.bfloat16)), "q_proj", INVARIANT, device)


@needs_compiler
def test_experts_that_are_not_multiplied_together_are_refused(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of several formats, which are known once they are loaded."""
    monkeypatch.setattr(CompiledWeight, "beside", lambda self, others: None)
    engine = Engine(tiny_model("qwen3_moe"), batch_invariant=True)
    with settings_of_torch_kept(), pytest.raises(ModelLoadError, match="batch_invariant=True.*formats"):
        engine.begin()
