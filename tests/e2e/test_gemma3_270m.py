"""Gemma 3 270M, where it is: `aengine model add gemma3-270m` fetches its 253 MB. Against transformers in float32.

Its base model: windows of 512 tokens in 15 of 18 layers, a rope for each kind of layer, quantised to four types.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import gguf
import pytest
import torch
from conftest_api import core_of
from transformers import Gemma3ForCausalLM, Gemma3TextConfig

from aengine import AsyncLLM, SamplingParams
from aengine.checkpoint.embedded import find_embedded
from aengine.checkpoint.source import ModelSource, resolve_model
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError

pytestmark = [pytest.mark.slow, pytest.mark.extended]  # a minute of reading; tiny models have all that it has
TEXTS = [
    "The capital of France is",
    "def fibonacci(n):\n    if n < 2:\n",
    "  1. Grüße, 世界 🦜\n",
    "<start_of_turn>user\nWhy is the sky blue?<end_of_turn>\n<start_of_turn>model\n",
]


@pytest.fixture(scope="module")
def source() -> ModelSource:
    try:
        find_embedded("gemma3-270m", join=False)
    except ModelLoadError as error:
        pytest.skip(str(error))
    return resolve_model(EngineConfig.create("gemma3-270m", {}))


@pytest.fixture(scope="module")
def logprobs(source: ModelSource) -> Callable[[list[int], int], torch.Tensor]:
    """transformers' model, of weights that the gguf package alone has read."""
    reader = gguf.GGUFReader(source.path)
    # What the file does not say is the default of transformers' own class.
    said = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    sizes = {key: source.hf_config[key] for key in (*said, "vocab_size", "max_position_embeddings", "sliding_window")}
    model = Gemma3ForCausalLM(Gemma3TextConfig(**sizes)).eval()
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.GEMMA3, model.config.num_hidden_layers)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(names.get_name(name, (".weight",)))
            data = torch.from_numpy(gguf.quants.dequantize(tensor.data, tensor.tensor_type).copy())
            parameter.copy_(data - 1 if "norm" in name else data)
    assert not stored

    @torch.inference_mode()
    def compute(ids: list[int], count: int) -> torch.Tensor:
        """Of the last ``count`` tokens, given all before: over 262,144 entries, which take longest."""
        logits = model(torch.tensor([ids]), use_cache=False, logits_to_keep=count + 1).logits[0, :-1]
        return torch.log_softmax(logits.float(), -1)

    return compute


async def test_greedy_tokens_are_those_of_transformers(
    source: ModelSource, logprobs: Callable[[list[int], int], torch.Tensor]
) -> None:
    """Also behind a prompt of more than a window."""
    params = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
    settings = {"dtype": "float32", "max_model_len": 1024, "kv_cache_memory_bytes": 96 * 2**20}
    async with AsyncLLM("gemma3-270m", **settings) as engine:
        tokenizer = core_of(engine).tokenizer
        prompts = [tokenizer.encode(text) for text in TEXTS]
        prompts.append(tokenizer.encode("An essay on the history of bread. " + "It rose, and was eaten. " * 90))
        assert all(prompt[0] == 2 for prompt in prompts) and len(prompts[-1]) > 600
        completions = await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))
        assert {group[0] for group in engine.describe()["kv_groups"]} == {"full", "window"}
    for prompt, completion in zip(prompts, completions, strict=True):
        expected = logprobs([*prompt, *completion.token_ids], len(completion.token_ids))
        best = expected.max(-1)
        for i, token_id in enumerate(completion.token_ids):
            # Two tokens this close are one to float32 in another order of summation.
            assert float(best.values[i] - expected[i, token_id]) <= 1e-4, f"position {i}: {token_id}"
