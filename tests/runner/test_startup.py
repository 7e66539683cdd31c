"""From a config to a runner that answers, with a tiny model of random weights; and starts that can't be."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from runner_fakes import request, step

from aengine.checkpoint.source import ModelSource
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError
from aengine.runner.model_runner import ModelRunner
from aengine.runner.startup.load import load_model
from aengine.workers.rank import ranks_of

VOCAB = 120
TINY = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "tie_word_embeddings": False,
}
BLOCK = 4


def start(**settings: Any) -> tuple[ModelRunner, dict[str, Any]]:
    settings = {"load_format": "dummy", "dtype": "float32", "block_size": BLOCK, "num_threads": 1} | settings
    config = EngineConfig.create("tiny", settings)
    source = ModelSource("tiny", "/nowhere", "dummy", TINY).to_wire()
    (rank,) = ranks_of(config)
    model = load_model(config, source, rank, lambda *report: None)
    runner, facts = model.allocate(model.offer)
    return runner, model.offer | facts


def generate(runner: ModelRunner, prompt: list[int], blocks: range, count: int = 12) -> list[int]:
    ids = [step(runner, {0: len(prompt)}, new=[request(0, prompt, blocks)]).token_ids[0]]
    ids += [step(runner, {0: 1}).token_ids[0] for _ in range(count - 1)]
    step(runner, removed=[0])
    return ids


def test_ready_says_what_the_host_needs() -> None:
    _, ready = start(max_num_seqs=4, kv_cache_memory_bytes=10**7)
    assert ready["block_size"] == BLOCK and ready["max_model_len"] == 96 and ready["vocab_size"] == VOCAB
    assert ready["num_blocks"] == 4 * 96 // BLOCK  # as many as four requests can use
    assert ready["max_num_batched_tokens"] == 512 and ready["device"] == "cpu" and ready["dtype"] == "float32"


def test_a_batch_of_all_kinds_answers_as_one_alone(rng: random.Random) -> None:
    """A decode, a chunk, a prefix hit and a whole prompt in one step."""
    runner, _ = start(max_num_seqs=8)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (5, 21, 9, 17)]
    prompts[2] = prompts[0][:BLOCK] + prompts[2]
    alone = [generate(runner, prompt, range(16), 4) for prompt in prompts]
    step(runner, {0: 5}, new=[request(0, prompts[0], range(4))])
    new = [
        request(3, prompts[3], range(30, 38)),
        request(1, prompts[1], range(10, 18)),
        request(2, prompts[2], [0, *range(20, 27)], num_computed_tokens=BLOCK),
    ]
    out = step(runner, {3: 17, 0: 1, 1: 13, 2: 9}, new=new)
    assert list(out.token_ids) == [alone[3][0], alone[0][1], -1, alone[2][0]]
    out = step(runner, {1: 8, 2: 1, 0: 1, 3: 1})
    assert list(out.token_ids) == [alone[1][0], alone[2][1], alone[0][2], alone[3][1]]


def test_what_a_block_held_before_can_not_spoil_its_new_owner(rng: random.Random) -> None:
    """A request whose KV is NaN leaves; its blocks go to others, in a batch where a mask covers their tails."""
    runner, _ = start(max_num_seqs=4)
    prompts = [[rng.randrange(VOCAB) for _ in range(n)] for n in (3, 14)]
    alone = [generate(runner, prompt, range(16), 6) for prompt in prompts]
    for layer in runner.kv_memory.layers.values():  # type: ignore[attr-defined]
        layer.cache.fill_(torch.nan)
    new = [request(i, prompt, range(16 * i, 16 * i + 16)) for i, prompt in enumerate(prompts)]
    got = [list(step(runner, {0: 3, 1: 14}, new=new).token_ids)]
    got += [list(step(runner, {0: 1, 1: 1}).token_ids) for _ in range(5)]
    assert [list(column) for column in zip(*got)] == alone


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"device": "cuda"}, "device='cuda'"),
        ({"device": "cuda:3"}, "device='cuda:3'"),
        ({"max_model_len": 200}, "max_model_len=200, but the model's context is 96"),
        ({"kv_cache_memory_bytes": 100}, "raise kv_cache_memory_bytes"),
        ({"kv_cache_memory_bytes": 2**60}, "lower kv_cache_memory_bytes"),
    ],
)
def test_starts_that_can_not_be(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelLoadError) as caught:
        start(**settings)
    assert message in str(caught.value) and "\n" not in str(caught.value)
