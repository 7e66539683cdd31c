"""An engine as a rollout of verl, by its registry; verl's extras of vLLM and SGLang are not needed.

    pip install verl aengine-llm
    python examples/verl_rollout.py FOLDER     # a model in 16 or 32 bits, with its tokenizer

A few updates are made with verl's own class, found by its registry, batches of its own kind, and weights by a
generator. Its PPO trainers run rollouts as Ray actors and want a `RolloutReplica` beside this class, which is not here.
"""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import Iterable
from typing import Any

import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM
from verl import DataProto
from verl.workers.rollout.base import _ROLLOUT_REGISTRY, BaseRollout, get_rollout_class

from aengine import AsyncLLM, SamplingParams


class AEngineRollout(BaseRollout):
    """`BaseRollout` over an engine of the same process. ``settings``: of `AsyncLLM`."""

    def __init__(self, config: Any, model_config: Any, device_mesh: Any, **settings: Any) -> None:
        self.config, self.model_config, self.device_mesh = config, model_config, device_mesh
        self.engine = AsyncLLM(model_config["path"], skip_tokenizer=True, **settings)

    async def resume(self, tags: list[str]) -> None:
        """Start the engine, or let it go on."""
        if self.engine.state in ("new", "closed"):
            await self.engine.start()
        elif self.engine.state == "paused":
            await self.engine.resume()

    async def update_weights(
        self, weights: Iterable[tuple[str, torch.Tensor]], wire_format: str = "named_tensors", **kwargs: Any
    ) -> None:
        """Take the trainer's weights, as they are made."""
        if wire_format != "named_tensors":
            raise ValueError(f"wire_format={wire_format!r}: whole tensors alone are taken")
        await self.engine.start_weight_update()
        await self.engine.update_weights(weights)
        await self.engine.finish_weight_update(version=kwargs.get("global_steps"))

    async def release(self) -> None:
        """Compute nothing until `resume`."""
        await self.engine.pause("abort")

    async def generate(self, prompts: DataProto) -> DataProto:
        """Return the responses to ``input_ids``, padded on the left, with the likelihoods of their tokens."""
        ids, mask = prompts.batch["input_ids"], prompts.batch["attention_mask"].bool()
        length = self.config["response_length"]
        params = SamplingParams(
            temperature=self.config["temperature"], max_tokens=length, ignore_eos=True, logprobs=0, detokenize=False
        )
        rows = [row[own].tolist() for row, own in zip(ids, mask, strict=True)]
        completions = await asyncio.gather(*(self.engine.generate(row, params) for row in rows))
        responses = torch.tensor([completion.token_ids for completion in completions])
        likelihoods = [[entries[0].logprob for entries in completion.logprobs or ()] for completion in completions]
        batch = {"prompts": ids, "responses": responses, "rollout_log_probs": torch.tensor(likelihoods)}
        versions = [completion.weight_versions for completion in completions]
        return DataProto(batch=TensorDict(batch, batch_size=len(rows)), meta_info={"weight_versions": versions})


_ROLLOUT_REGISTRY["aengine", "async"] = f"{__name__}.AEngineRollout"


async def run(folder: str, num_steps: int) -> None:
    policy = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    optimizer = torch.optim.AdamW(policy.parameters(), lr=1e-3)
    config = {"temperature": 1.0, "response_length": 8}
    settings = {"dtype": "float32", "kv_cache_memory_bytes": 64 << 20, "logprobs_mode": "processed_logprobs"}
    rollout: Any = get_rollout_class("aengine")(config, {"path": folder}, None, **settings)
    await rollout.resume(["weights", "kv_cache"])
    ids = torch.randint(5, policy.config.vocab_size, (4, 6))
    mask = torch.ones_like(ids)
    prompts = DataProto(batch=TensorDict({"input_ids": ids, "attention_mask": mask}, batch_size=4))
    for step in range(num_steps):
        answers = await rollout.generate(prompts)
        responses = answers.batch["responses"]
        logits = policy(torch.cat([ids, responses], 1)).logits[:, ids.shape[1] - 1 : -1]
        own = torch.log_softmax(logits, -1).gather(-1, responses[..., None])[..., 0]
        distance = float((own.detach() - answers.batch["rollout_log_probs"]).abs().max())
        version = answers.meta_info["weight_versions"][0]
        print(f"step {step}: version {version}, log-probabilities differ by {distance:.1e}")
        optimizer.zero_grad()
        (-own.mean()).backward()
        optimizer.step()
        await rollout.update_weights(iter(policy.state_dict().items()), global_steps=step + 1)
    await rollout.release()
    await rollout.engine.aclose()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    asyncio.run(run(args.folder, args.steps))
