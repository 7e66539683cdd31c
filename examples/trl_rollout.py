"""TRL's GRPOTrainer over an engine of the same process, by its `rollout_func`; neither vLLM nor a server is needed.

    pip install trl
    python examples/trl_rollout.py Qwen/Qwen3-0.6B

The engine gets the trainer's weights before each step's completions. The reward is a toy, the share of vowels.
"""

from __future__ import annotations

import argparse
from typing import Any

from datasets import Dataset
from trl import GRPOConfig, GRPOTrainer

from aengine import LLM, SamplingParams


class EngineRollouts:
    """What TRL calls for completions."""

    def __init__(self, engine: LLM) -> None:
        self._engine = engine
        self._step = 0  # the step of the trainer whose weights the engine has

    def __call__(self, prompts: list[str], trainer: GRPOTrainer) -> dict[str, Any]:
        """Return a completion for each prompt, which is there as often as its group is large."""
        step = trainer.state.global_step
        if step != self._step:
            self._engine.start_weight_update()
            self._engine.update_weights(trainer.accelerator.unwrap_model(trainer.model).state_dict())
            self._engine.finish_weight_update(version=step)
            self._step = step
        args = trainer.args
        # TRL wants the likelihoods of the tokens as they were drawn: of the temperature's distribution.
        params = SamplingParams(temperature=args.temperature, max_tokens=args.max_completion_length, logprobs=0)
        encoded = [trainer.processing_class(prompt)["input_ids"] for prompt in prompts]
        completions = self._engine.generate(encoded, params)
        print(f"step {step}: {len(completions)} completions of version {completions[0].weight_versions}", flush=True)
        return {
            "prompt_ids": encoded,
            "completion_ids": [list(completion.token_ids) for completion in completions],
            "logprobs": [[entries[0].logprob for entries in completion.logprobs or ()] for completion in completions],
        }


def share_of_vowels(completions: list[str], **_: Any) -> list[float]:
    """The reward of each text."""
    return [sum(letter in "aeiou" for letter in text) / max(1, len(text)) for text in completions]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder or a hub id, in 16 or 32 bits")
    parser.add_argument("--steps", type=int, default=4)
    args = parser.parse_args()
    settings = GRPOConfig(
        output_dir="trl-output",
        max_steps=args.steps,
        per_device_train_batch_size=8,
        num_generations=4,
        max_completion_length=16,
        learning_rate=1e-4,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        bf16=False,
    )
    texts = Dataset.from_dict({"prompt": ["Once upon a time", "The capital of France", "I like", "Hello"] * 8})
    memory = 64 << 20  # bytes for keys and values; the rest is the trainer's
    with LLM(args.model, dtype="float32", kv_cache_memory_bytes=memory, logprobs_mode="processed_logprobs") as engine:
        trainer = GRPOTrainer(
            model=args.model,
            reward_funcs=share_of_vowels,
            args=settings,
            train_dataset=texts,
            rollout_func=EngineRollouts(engine),
        )
        trainer.train()


if __name__ == "__main__":
    main()
