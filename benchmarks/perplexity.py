"""Perplexity of a model, JSON to stdout: on a CPU, with weights and activations in each of several formats, in one run;
or on any device, with keys and values in several formats.

    python benchmarks/perplexity.py                          SmolLM2: a GGUF's codes with activations of 16 bits; exact
    python benchmarks/perplexity.py --model gemma3-270m
    python benchmarks/perplexity.py --kv                     keys and values in 16 bits and in FP8, through the engine

The text is Python's own documentation of the language (pydoc_data.topics), which every machine has, in pieces of 512
tokens. "exact": the dequantised weights and activations in float32. "distance" is that of the logits from the exact
ones, relative, in the mean over positions; "kl": the Kullback-Leibler divergence of the next token, in nats. With --kv
prompts are computed 128 tokens a step, so that each chunk reads what the cache holds of those before it.
"""

from __future__ import annotations

import argparse
import json
import math
import pydoc_data.topics
from typing import Any

import torch
from torch import Tensor

from aengine import LLM, SamplingParams
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.tokenizer.tokenizer import Tokenizer
from aengine.ipc.messages import NewRequest, SchedulerOutput, int32
from aengine.runner.startup.load import load_model
from aengine.workers.rank import Rank

FORMATS: dict[str, dict[str, Any]] = {
    "exact": {"dtype": "float32"},
    "16 bits": {"dtype": "float16"},
    "auto": {"dtype": "auto"},
}
KV_FORMATS: dict[str, dict[str, Any]] = {
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, KV fp8": {"dtype": "bfloat16", "kv_cache_dtype": "fp8"},
}
TOKENS = 512


def texts(tokenizer: Any, count: int) -> list[list[int]]:
    topics = "\n\n".join(text for _, text in sorted(pydoc_data.topics.topics.items()))
    ids = tokenizer.encode(topics[: 8 * TOKENS * count])
    return [ids[i * TOKENS : (i + 1) * TOKENS] for i in range(count)]


def logits_of(model: str, settings: dict[str, Any], prompts: list[list[int]]) -> list[Tensor]:
    """The logits of each position of each prompt, float16 [TOKENS, vocab_size]."""
    config = EngineConfig.create(model, {"max_model_len": 2 * TOKENS, "max_num_seqs": 1, **settings})
    loaded: Any = load_model(config, resolve_model(config).to_wire(), Rank(index=0, device="cpu"), lambda *_: None)
    runner, _ = loaded.allocate({"num_blocks": 256, "max_model_len": 2 * TOKENS})
    forward, hidden = runner.model.forward, list[Tensor]()

    def kept(*args: Any) -> Tensor:
        hidden.append(forward(*args))
        return hidden[-1]

    runner.model.forward = kept
    found = []
    for step, prompt in enumerate(prompts):
        groups = runner.tables.groups
        counts = [-(-len(prompt) // group.block_size) for group in groups]
        blocks, spans = int32(i for n in counts for i in range(n)), int32(x for n in counts for x in (0, n))
        new = NewRequest(0, int32(prompt), len(prompt), 0, blocks, temperature=0.0, block_spans=spans)
        removed = int32([0] if step else [])
        one = int32([0]), int32([len(prompt)])
        runner.execute_model(
            SchedulerOutput(step, removed=removed, new_requests=[new], req_idx=one[0], num_scheduled_tokens=one[1])
        )
        runner.sample_tokens(None)
        with torch.inference_mode():
            found.append(runner.model.compute_logits(hidden.pop()).half())
        hidden.clear()
    return found


def kv_perplexity(model: str, settings: dict[str, Any], prompts: list[list[int]]) -> float:
    """The perplexity of the prompts, each read in chunks of 128 tokens."""
    limits = {"max_model_len": 2 * TOKENS, "max_num_seqs": 8, "max_num_batched_tokens": 128}
    with LLM(model, **limits, **settings) as llm:
        done = llm.generate(prompts, SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0))
    found = [entry[0].logprob for one in done for entry in (one.prompt_logprobs or ()) if entry]
    return math.exp(-sum(found) / len(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--texts", type=int, default=4)
    parser.add_argument("--kv", action="store_true", help="compare formats of keys and values, through the engine")
    parser.add_argument("--device", default="auto", help="with --kv: where")
    args = parser.parse_args()
    tokenizer = Tokenizer.load(resolve_model(EngineConfig.create(args.model, {})))
    prompts = texts(tokenizer, args.texts)
    exact: list[Tensor] = []
    result: dict[str, Any] = {"model": args.model, "texts": args.texts, "tokens": TOKENS}
    if args.kv:
        result |= {
            name: kv_perplexity(args.model, {"device": args.device} | own, prompts) for name, own in KV_FORMATS.items()
        }
        print(json.dumps(result, indent=2))
        return
    for name, settings in FORMATS.items():
        loss = distance = divergence = 0.0
        own = logits_of(args.model, settings, prompts)
        exact = exact or own
        for prompt, logits, right in zip(prompts, own, exact, strict=True):
            found, wanted = logits[:-1].float(), right[:-1].float()
            logprobs, own_right = torch.log_softmax(found, -1), torch.log_softmax(wanted, -1)
            loss -= float(logprobs.gather(1, torch.tensor(prompt[1:])[:, None]).mean())
            distance += float(((found - wanted).norm(dim=1) / wanted.norm(dim=1)).mean())
            divergence += float((own_right.exp() * (own_right - logprobs)).sum(-1).mean())
        n = len(prompts)
        result[name] = {"perplexity": math.exp(loss / n), "distance": distance / n, "kl": divergence / n}
    print(json.dumps(result, indent=2))


if __name__ == "__main__":
    main()
