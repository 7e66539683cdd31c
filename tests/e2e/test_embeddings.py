"""Embeddings and scores by real workers, against transformers on the same folder."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import torch
import transformers as tf
from conftest_api import settled
from safetensors.torch import load_file, save_file

from aengine import AsyncLLM, InvalidRequestError, ModelLoadError, SamplingParams

sys.path.append(str(Path(__file__).parents[1] / "models"))  # behind all else: that folder has a conftest.py too
from tiny import load_reference, write_tiny_model

pytestmark = pytest.mark.slow
SETTINGS: dict[str, Any] = {"dtype": "float32", "num_threads": 1, "preload_grammars": False}
DECODER = {**SETTINGS, "max_model_len": 96, "block_size": 4, "max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.fixture(scope="module")
def decoder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A decoder whose checkpoint has a pooling of the last token, a dense layer and prompts."""
    folder = write_tiny_model(tmp_path_factory.mktemp("decoder"), "qwen3", seed=3, tie_word_embeddings=True)
    modules = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Dense", "2_Dense"), ("Normalize", "3_Normalize")]
    write_json(
        folder / "modules.json",
        [
            {"idx": i, "path": path, "type": f"sentence_transformers.models.{kind}"}
            for i, (kind, path) in enumerate(modules)
        ],
    )
    write_json(folder / "1_Pooling/config.json", {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False})
    tanh = "torch.nn.modules.activation.Tanh"
    write_json(folder / "2_Dense/config.json", {"in_features": 48, "out_features": 20, "activation_function": tanh})
    generator = torch.Generator().manual_seed(1)
    weights = {
        "linear.weight": torch.randn(20, 48, generator=generator),
        "linear.bias": torch.randn(20, generator=generator),
    }
    save_file(weights, folder / "2_Dense/model.safetensors")
    write_json(folder / "config_sentence_transformers.json", {"prompts": {"query": "Q:"}, "default_prompt_name": None})
    tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_tokens(["yes", "no"])
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def write_json(path: Path, value: Any) -> None:
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps(value))


def some_prompts(count: int, longest: int) -> list[list[int]]:
    rng = random.Random(1)
    return [[rng.randrange(256) for _ in range(rng.randint(1, longest))] for _ in range(count)]


@torch.no_grad()
def last_states(folder: Path, prompts: list[list[int]]) -> list[torch.Tensor]:
    model = load_reference(folder, "qwen3").model
    return [model(torch.tensor([ids])).last_hidden_state[0] for ids in prompts]


async def test_a_decoder_embeds_and_generates_at_once(decoder: Path) -> None:
    """In chunks of 16 tokens, preempted now and then, also after a prefix hit."""
    prompts = some_prompts(30, 80)
    dense = load_file(decoder / "2_Dense/model.safetensors")
    pooled = torch.stack([states[-1] for states in last_states(decoder, prompts)])
    expected = torch.tanh(pooled @ dense["linear.weight"].T + dense["linear.bias"]).numpy()
    greedy = SamplingParams(max_tokens=12, temperature=0, ignore_eos=True)
    async with AsyncLLM(decoder, kv_cache_memory_bytes=30 * 4 * 2 * 3 * 2 * 16 * 4, **DECODER) as engine:
        alone = await engine.generate(prompts[0], greedy)
        texts = [engine.generate(prompt[:40], greedy) for prompt in prompts[:8]]
        found, again, *completions = await asyncio.gather(
            engine.embed(prompts, normalize=False), engine.embed(prompts, normalize=False), *texts
        )
        assert np.abs(found - expected).max() < 1e-4 and np.abs(again - expected).max() < 1e-4
        assert len(completions) == 8 and len(alone.choices[0].token_ids) == 12
        query = await engine.embed("ab", prompt_name="query")
        assert np.abs(query - await engine.embed("Q:ab")).max() < 1e-6
        await settled(engine)


async def test_the_mean_of_chunks(decoder: Path) -> None:
    prompts = some_prompts(12, 80)
    expected = np.array([states.mean(0).numpy() for states in last_states(decoder, prompts)])
    (decoder / "modules.json").rename(decoder / "modules.json.away")
    try:
        async with AsyncLLM(decoder, pooling="mean", **DECODER) as engine:
            for _ in range(2):  # the second time their KV is there
                found = await engine.embed([*prompts, prompts[0]], normalize=False)
                assert np.abs(found[:-1] - expected).max() < 1e-4 and np.abs(found[0] - found[-1]).max() < 1e-4
        async with AsyncLLM(decoder, **DECODER) as engine:
            with pytest.raises(InvalidRequestError, match="its checkpoint does not say how"):
                await engine.embed("a")
    finally:
        (decoder / "modules.json.away").rename(decoder / "modules.json")


async def test_yes_or_no(decoder: Path, tmp_path: Path) -> None:
    """A decoder scores by how likely yes is against no. Names of special tokens in a document stay text."""
    shutil.copytree(decoder, tmp_path, dirs_exist_ok=True)
    (tmp_path / "modules.json").unlink()
    config = json.loads((tmp_path / "config.json").read_text()) | {"max_position_embeddings": 1024}
    write_json(tmp_path / "config.json", config)
    settings = {**DECODER, "max_model_len": 700, "max_num_batched_tokens": 256}
    query, documents = "which one?", ["the first", "another", "</s><s>", "the first"]
    async with AsyncLLM(tmp_path, **settings) as engine:
        encode = engine.tokenizer.encode
        expected = []
        system = (
            "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
            'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        )
        model = load_reference(tmp_path, "qwen3")
        for document in documents:
            body = f"<Instruct>: Be strict\n<Query>: {query}\n<Document>: {document}"
            ids = [
                *encode(system, add_special_tokens=False),
                *encode(body, add_special_tokens=False, allow_special=False),
            ]
            ids += encode("<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n", add_special_tokens=False)
            with torch.no_grad():
                logits = model(torch.tensor([ids])).logits[0, -1]
            expected.append(float(torch.softmax(logits[[encode("yes")[-1], encode("no")[-1]]], 0)[0]))
        ranked = await engine.rerank(query, documents, instruction="Be strict")
        assert [one.document for one in ranked] == [documents[one.index] for one in ranked]
        assert [one.score for one in ranked] == sorted((one.score for one in ranked), reverse=True)
        assert max(abs(one.score - expected[one.index]) for one in ranked) < 1e-4
        assert len(await engine.rerank(query, documents, top_n=2)) == 2
        assert engine.statistics().prefix_cache_hits > 0
        yes, no = (encode(word)[-1] for word in ("yes", "no"))
    weights = load_file(tmp_path / "model.safetensors")
    table = weights.pop("lm_head.weight", weights["model.embed_tokens.weight"])
    save_file({**weights, "score.weight": table[[yes]] - table[[no]]}, tmp_path / "model.safetensors")
    as_classes = {"architectures": ["Qwen3ForSequenceClassification"], "id2label": {"0": "LABEL_0"}}
    write_json(tmp_path / "config.json", config | as_classes)
    async with AsyncLLM(tmp_path, **settings) as engine:  # the reranker, converted to a sequence classification
        again = await engine.rerank(query, documents, instruction="Be strict")
        assert [one.document for one in again] == [one.document for one in ranked]  # two of them are equal
        assert max(abs(a.score - b.score) for a, b in zip(again, ranked, strict=True)) < 1e-4
        with pytest.raises(InvalidRequestError, match="classifies texts, and generates none"):
            await engine.generate("a")
        with pytest.raises(InvalidRequestError, match="classifies texts, and gives no embeddings"):
            await engine.embed("a")


async def test_an_encoder(tmp_path: Path) -> None:
    torch.manual_seed(2)
    config = tf.BertConfig(
        vocab_size=99,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        intermediate_size=40,
        max_position_embeddings=64,
    )
    model = tf.BertForSequenceClassification(config).eval()
    model.save_pretrained(tmp_path)
    prompts = [[1 + i % 98 for i in ids] for ids in some_prompts(90, 64)]
    with torch.no_grad():
        expected = np.array([model(torch.tensor([ids])).logits[0].numpy() for ids in prompts])
    async with AsyncLLM(tmp_path, skip_tokenizer=True, max_num_seqs=8, max_num_batched_tokens=64, **SETTINGS) as engine:
        assert np.abs(await engine.classify(prompts) - expected).max() < 1e-4
        with pytest.raises(InvalidRequestError, match="an encoder, which generates no text"):
            await engine.generate([1, 2])
        with pytest.raises(InvalidRequestError, match="classifies texts, and gives no embeddings"):
            await engine.embed(prompts)
        await settled(engine)
        statistics = engine.statistics()
        assert statistics.num_free_blocks == statistics.num_blocks and statistics.prompt_tokens == sum(
            map(len, prompts)
        )


async def test_a_pooling_that_is_not_there(decoder: Path, tmp_path: Path) -> None:
    tf.BertModel(
        tf.BertConfig(vocab_size=9, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    ).save_pretrained(tmp_path)
    write_json(tmp_path / "modules.json", [{"path": "1_Pooling", "type": "sentence_transformers.models.Pooling"}])
    write_json(tmp_path / "1_Pooling/config.json", {"pooling_mode": "weightedmean"})
    with pytest.raises(ModelLoadError, match="its pooling is weightedmean"):
        await AsyncLLM(tmp_path, skip_tokenizer=True, **SETTINGS).start()
    with pytest.raises(ModelLoadError, match="pooling='cls' is for encoders"):
        await AsyncLLM(decoder, pooling="cls", **DECODER).start()
