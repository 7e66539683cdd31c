"""Reinforcement learning with an engine in the trainer's own process: GRPO, in plain torch.

    python examples/grpo.py            # a model of SmolLM2's width and vocabulary, two random layers; minutes on a CPU
    python examples/grpo.py --seeds 3  # the same from three seeds, and whether the reward has grown

Each step: the engine samples groups of completions, the trainer makes one step of gradient, and the engine gets the new
weights where it is. The task is a toy that needs no data: of 64 tokens, those with an even id are worth 1.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import tempfile
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from aengine import AsyncLLM, Completion, SamplingParams

PROMPTS, GROUP, LENGTH = 2, 8, 8
CLIP = 0.2
ALPHABET = list(range(1000, 1064))  # of so few tokens, each is seen often enough to be learnt
SMOLLM2 = LlamaConfig(
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_hidden_layers=2,
    num_attention_heads=9,
    num_key_value_heads=3,
    max_position_embeddings=512,
    rope_theta=100000.0,
    rms_norm_eps=1e-5,
    tie_word_embeddings=True,
    initializer_range=1 / 24,  # 1 / sqrt(hidden_size)
)


def reward_of(token_ids: tuple[int, ...]) -> float:
    """The share of tokens with an even id."""
    return sum(token % 2 == 0 for token in token_ids) / len(token_ids)


async def sample(engine: AsyncLLM, prompts: list[list[int]], step: int) -> list[Completion]:
    """A group of completions of each prompt, with the log-probabilities that they were sampled with."""
    params = SamplingParams(
        n=GROUP,
        max_tokens=LENGTH,
        ignore_eos=True,
        allowed_token_ids=ALPHABET,
        logprobs=0,
        detokenize=False,
        seed=1000 * step,
    )
    return await asyncio.gather(*(engine.generate(prompt, params) for prompt in prompts))


def batch_of(prompts: list[list[int]], groups: list[Completion]) -> tuple[torch.Tensor, ...]:
    """Return token ids, the sampled tokens' log-probabilities then, and each completion's advantage in its group."""
    rows, before, advantages = [], [], []
    for prompt, group in zip(prompts, groups, strict=True):
        rewards = torch.tensor([reward_of(choice.token_ids) for choice in group.choices])
        advantages.append((rewards - rewards.mean()) / (rewards.std() + 1e-4))
        for choice in group.choices:
            rows.append(prompt + list(choice.token_ids))
            before.append([entries[0].logprob for entries in choice.logprobs or ()])
    return torch.tensor(rows), torch.tensor(before), torch.cat(advantages)


def learn(policy: LlamaForCausalLM, optimizer: torch.optim.Optimizer, batch: tuple[torch.Tensor, ...]) -> float:
    """Make one step of gradient. Returns the largest distance between the engine's log-probabilities and ours."""
    rows, before, advantages = batch
    logits = policy(rows, logits_to_keep=LENGTH + 1).logits[:, :-1, ALPHABET]
    now = torch.log_softmax(logits, -1).gather(-1, rows[:, -LENGTH:, None] - ALPHABET[0])[..., 0]
    ratio = (now - before).exp()
    clipped = ratio.clamp(1 - CLIP, 1 + CLIP)
    loss = -torch.minimum(ratio * advantages[:, None], clipped * advantages[:, None]).mean()
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(policy.parameters(), 1.0)
    optimizer.step()
    return float((now.detach() - before).abs().max())


async def train(seed: int, num_steps: int) -> list[float]:
    """Return the mean reward of each step."""
    torch.manual_seed(seed)
    policy = LlamaForCausalLM(SMOLLM2)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=2e-3, weight_decay=0.0)
    means = []
    with tempfile.TemporaryDirectory() as folder:
        policy.save_pretrained(folder)
        engine = AsyncLLM(
            folder,
            device="cpu",
            dtype="float32",
            skip_tokenizer=True,
            kv_cache_memory_bytes=64 << 20,
            logprobs_mode="processed_logprobs",
        )
        async with engine:
            for step in range(num_steps):
                begun = time.perf_counter()
                prompts = torch.randint(0, SMOLLM2.vocab_size, (PROMPTS, 4)).tolist()
                groups = await sample(engine, prompts, step)
                sampled = time.perf_counter()
                batch = batch_of(prompts, groups)
                distance = await asyncio.to_thread(learn, policy, optimizer, batch)
                learned = time.perf_counter()
                await engine.start_weight_update()
                # the output matrix is that of the embeddings, which come once
                await engine.update_weights((k, v) for k, v in policy.state_dict().items() if k != "lm_head.weight")
                version = await engine.finish_weight_update()
                rewards = [reward_of(choice.token_ids) for group in groups for choice in group.choices]
                means.append(statistics.mean(rewards))
                print(
                    f"seed {seed} step {step:2}: reward {means[-1]:.3f}; log-probabilities differ by {distance:.1e}; "
                    f"sampling {sampled - begun:.1f} s, learning {learned - sampled:.1f} s, "
                    f"weights {time.perf_counter() - learned:.1f} s (version {version})",
                    flush=True,
                )
    return means


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--steps", type=int, default=15)
    args = parser.parse_args()
    for seed in range(args.seeds):
        means = asyncio.run(train(seed, args.steps))
        first, last = means[:5], means[-5:]
        error = (statistics.variance(first) / 5 + statistics.variance(last) / 5) ** 0.5
        gain = statistics.mean(last) - statistics.mean(first)
        print(f"seed {seed}: {statistics.mean(first):.3f} -> {statistics.mean(last):.3f}, {gain / error:.1f} errors")


if __name__ == "__main__":
    main()
