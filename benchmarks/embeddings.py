"""Embeddings of one model, texts/s: this engine beside sentence-transformers' and transformers' way, in turns.

    python benchmarks/embeddings.py FOLDER [--texts 600] [--rounds 5] [--threads 2] [--longest 200]

Texts of mixed lengths (most of them short, some long), the same for all; each round times each way once, and what is
shown is the median over the rounds, and the median of each round's ratio. The other ways:

    transformers            batches of 32 texts sorted by length, padded to the longest of their batch
    sentence-transformers   `SentenceTransformer.encode` by its defaults, if it is installed

Vectors of all ways are compared: the largest difference is shown.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import statistics
import time
from collections.abc import Callable, Coroutine
from typing import Any

import numpy as np

from aengine import AsyncLLM

WORDS = [
    *("the", "of", "and", "to", "in", "is", "that", "for", "it", "as", "was", "with", "be", "by", "on", "not", "his"),
    *("water", "people", "number", "sentence", "government", "history", "temperature", "different", "language"),
    *(
        "between",
        "important",
        "through",
        "children",
        "thought",
        "together",
        "example",
        "mountain",
        "certain",
        "measure",
    ),
]

Way = Callable[[list[str]], Coroutine[Any, Any, np.ndarray]]


def make_texts(count: int, longest: int, seed: int = 0) -> list[str]:
    """Make texts whose lengths are log-normal about 30 words, cut at ``longest``."""
    rng = random.Random(seed)
    lengths = [min(longest, max(2, int(rng.lognormvariate(3.4, 0.8)))) for _ in range(count)]
    return [" ".join(rng.choices(WORDS, k=length)) for length in lengths]


def transformers_way(folder: str) -> Way:
    import torch
    from transformers import AutoModel, AutoTokenizer

    tokenizer, model = AutoTokenizer.from_pretrained(folder), AutoModel.from_pretrained(folder).eval()

    @torch.inference_mode()
    def encode(texts: list[str]) -> np.ndarray:
        order = sorted(range(len(texts)), key=lambda i: -len(texts[i]))
        found: dict[int, np.ndarray] = {}
        for begin in range(0, len(order), 32):
            own = order[begin : begin + 32]
            batch = tokenizer(
                [texts[i] for i in own], padding=True, truncation=True, max_length=256, return_tensors="pt"
            )
            mask = batch["attention_mask"][..., None]
            pooled = (model(**batch).last_hidden_state * mask).sum(1) / mask.sum(1)
            found |= dict(zip(own, torch.nn.functional.normalize(pooled).numpy(), strict=True))
        return np.stack([found[i] for i in range(len(texts))])

    async def way(texts: list[str]) -> np.ndarray:
        return encode(texts)

    return way


def sentence_transformers_way(folder: str) -> Way:
    from sentence_transformers import SentenceTransformer

    model = SentenceTransformer(folder, device="cpu")

    async def way(texts: list[str]) -> np.ndarray:
        return np.asarray(model.encode(texts, normalize_embeddings=True, show_progress_bar=False))

    return way


async def measure(ways: dict[str, Way], texts: list[str], rounds: int) -> None:
    vectors = {name: await way(texts[:64]) for name, way in ways.items()}  # also warms them up
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(rounds):
        for name, way in ways.items():
            begun = time.perf_counter()
            await way(texts)
            rates[name].append(len(texts) / (time.perf_counter() - begun))
    ours = rates["aengine"]
    for name, own in rates.items():
        ratio = statistics.median(mine / theirs for mine, theirs in zip(ours, own, strict=True))
        distance = np.abs(vectors[name] - vectors["aengine"]).max()
        print(
            f"{name:22} {statistics.median(own):8.1f} texts/s ({min(own):.1f} to {max(own):.1f}); aengine is "
            f"{ratio:.2f} times as fast; vectors differ by {distance:.1e}"
        )


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", help="a model of embeddings")
    parser.add_argument("--texts", type=int, default=600)
    parser.add_argument("--longest", type=int, default=200, help="words of the longest text")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--batched-tokens", type=int, help="max_num_batched_tokens of the engine")
    args = parser.parse_args()
    import torch

    torch.set_num_threads(args.threads)
    texts = make_texts(args.texts, args.longest)
    settings = {"num_threads": args.threads, "max_num_batched_tokens": args.batched_tokens}
    async with AsyncLLM(args.folder, **settings) as engine:

        async def ours(texts: list[str]) -> np.ndarray:
            return await engine.embed(texts)

        ways: dict[str, Way] = {"aengine": ours, "transformers": transformers_way(args.folder)}
        try:
            ways["sentence-transformers"] = sentence_transformers_way(args.folder)
        except ImportError as error:
            print(f"sentence-transformers is left out: {error}")
        await measure(ways, texts, args.rounds)


if __name__ == "__main__":
    asyncio.run(main())
