"""transformers as the judge: the same dequantised weights, in float32, on the same machine."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence

import pytest
import torch
from gguf import GGUFReader
from gguf.quants import dequantize
from page_runner import ForkedPages
from pairs import some

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig

_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def _hf_name(name: str) -> str:
    if name == "token_embd.weight":
        return "model.embed_tokens.weight"
    if name == "output_norm.weight":
        return "model.norm.weight"
    _, layer, kind, _ = name.split(".")
    return f"model.layers.{layer}.{_NAMES[kind]}.weight"


def _state_dict(path: str, num_heads: int, num_kv_heads: int) -> dict[str, torch.Tensor]:
    """Read by the gguf package alone, so that our reader is not its own judge."""
    state: dict[str, torch.Tensor] = {}
    for tensor in GGUFReader(path).tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        for kind, heads in (("attn_q", num_heads), ("attn_k", num_kv_heads)):
            if f".{kind}." in tensor.name:  # llama.cpp interleaves the two halves of the rotary pairs
                rows, columns = weight.shape
                weight = weight.view(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)
        state[_hf_name(tensor.name)] = weight
    return state


class Judge:
    """What transformers says about a sequence: the embedded model, or a file with some of its layers."""

    def __init__(self, model: str) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM  # five seconds, which not every process of tests needs

        source = resolve_model(EngineConfig.create(model, {}))
        config = LlamaConfig(**source.hf_config)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            self._known: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
            self.model = LlamaForCausalLM(config).eval()
            state = _state_dict(source.path, config.num_attention_heads, config.num_key_value_heads)
            missing, unexpected = self.model.load_state_dict(state, strict=False)
        layers = {f"model.layers.{i}." for i in range(config.num_hidden_layers, 30)}
        assert set(missing) <= {"lm_head.weight"} and all(name.startswith(tuple(layers)) for name in unexpected)
        self.model.tie_weights()

    @torch.inference_mode()
    def logprobs(self, prompt: Sequence[int], output: Sequence[int]) -> torch.Tensor:
        """float32 [len(output), vocab_size]: of each position of the output, given all before it."""
        ids = torch.tensor([[*prompt, *output]])
        logits = self.model(ids).logits[0, len(prompt) - 1 : -1].float()
        return torch.log_softmax(logits, -1)

    def check_greedy(self, prompt: Sequence[int], output: Sequence[int]) -> None:
        """Each token is the likeliest, given those before: by induction the sequence is transformers' greedy one.

        What was judged, or the beginning of it, is not computed again.
        """
        known = self._known.setdefault(tuple(prompt), [])
        if any(before[: len(output)] == tuple(output) for before in known):
            return
        logprobs = self.logprobs(prompt, output)
        best = logprobs.max(-1)
        for i, token_id in enumerate(output):
            gap = float(best.values[i] - logprobs[i, token_id])
            # Two tokens this close are one to float32 in another order of summation.
            assert gap <= 1e-4, f"position {i}: {token_id} instead of {int(best.indices[i])}, {gap:.2g} less likely"
        known.append(tuple(output))


judge_of = functools.cache(Judge)
"""One for all files: to read the weights takes two seconds."""


@pytest.fixture(scope="module", params=some(["short", "whole"], "short"))
def smollm2(request: pytest.FixtureRequest) -> str:
    """The model of tests to which any is as good as another; `make test-all` runs them with the whole one, too."""
    return str(request.getfixturevalue("short_model")) if request.param == "short" else "smollm2-135m"


@pytest.fixture(scope="module")
def judge(smollm2: str) -> Iterator[Judge]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # several wait for each other by spinning: twice the CPU time where others want the cores
    yield judge_of(smollm2)
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def forked_pages() -> Iterator[ForkedPages]:
    pages = ForkedPages()
    yield pages
    pages.close()
