"""What heads that `train_draft_heads.py` has trained bring in the engine, beside their references and no speculation.

    python benchmarks/accepted_drafts.py --heads DIR/dflash DIR/peagle                  float32: the same steps, tokens
    python benchmarks/accepted_drafts.py --heads DIR/dflash --dtype bfloat16 --speed    tokens a second

The first drafts in every step, one greedy text after another, and compares what each step accepts with what the plain
torch of tests/models/draft_heads.py says of the same text; and all texts with those of an engine that drafts nothing.
With --speed the engine decides what is drafted, as always.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from train_draft_heads import CHAT, KINDS, captured, load_target

from aengine import AsyncLLM, SamplingParams
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.scheduler.request import Request
from aengine.engine.speculation import choice, proposer
from aengine.engine.speculation.budget import DraftBudget
from aengine.engine.speculation.history import NONE_CANCELLABLE, DraftHistory, Guess, PendingTokens
from aengine.engine.tokenizer.tokenizer import Tokenizer

DRAFTED = 3
QUESTIONS = (
    "What does a compiler do?",
    "Write a short story about a lighthouse.",
    "How is bread made?",
    "Explain how a list differs from a tuple in Python.",
    "Why is the sky blue?",
    "Name five rivers and where they end.",
    "Describe a walk through a forest in autumn.",
    "What is a prime number? Give examples.",
)


class EveryStep(DraftHistory):
    """Guesses whatever came of it."""

    found: list[tuple[int, int]] = []  # noqa: RUF012 (tokens drafted and accepted, of each step)

    def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
        self.found.append((num_drafted, num_accepted))

    def guess(self, request: Request, most: int, pending: PendingTokens = NONE_CANCELLABLE) -> Guess:
        return Guess([-1] * min(most, DRAFTED), [0.9] * min(most, DRAFTED))


class Reference:
    """A head in plain torch, over transformers' model, in float32."""

    def __init__(self, folder: Path, target: Any, device: str) -> None:
        config = json.loads((folder / "config.json").read_text())
        table = target.model.embed_tokens.weight.detach()
        self._target, self._device = target, device
        with torch.device(device):
            self._head = KINDS[folder.name](config, table, table)
        tensors = {
            name.removeprefix(self._head.prefix): x for name, x in load_file(folder / "model.safetensors").items()
        }
        self._head.load_state_dict(tensors)
        self._head.to(device).eval()

    @torch.inference_mode()
    def accepted(self, ids: list[int], num_prompt: int) -> list[int]:
        """How many drafts each step behind the first accepts."""
        text = torch.tensor([ids], device=self._device)
        states = captured(self._target, text)
        read = states["last" if self._head.config.get("model_type") == "mimo_mtp" else "aux"]
        _, drafts = self._head.roll_out(read[:, :-1].float(), text[:, 1:], DRAFTED)
        right = torch.stack([own[0] for own in drafts], -1).tolist()
        found, place = list[int](), num_prompt + 1
        while place + DRAFTED < len(ids) - 1:
            wanted = ids[place + 1 : place + 1 + DRAFTED]
            same = [a == b for a, b in zip(right[place - 1], wanted, strict=True)]
            found.append([*same, False].index(False))
            place += found[-1] + 1
        return found


async def run(args: argparse.Namespace, how: Any, prompts: list[list[int]]) -> dict[str, Any]:
    """What an engine makes of the prompts, one after another, and of all of them at once; and in which time."""
    greedy = SamplingParams(temperature=0, max_tokens=args.max_tokens, ignore_eos=True)
    # A leased step has no drafts, and what the reference is compared with is a draft behind each step.
    sizes: dict[str, Any] = {"max_num_seqs": 16, "max_model_len": 1024, "gpu_memory_utilization": 0.3}
    sizes |= {} if args.speed else {"max_leased_steps": 0}
    begun = time.monotonic()
    async with AsyncLLM(args.model, dtype=args.dtype, device=args.device, speculation=how, **sizes) as engine:
        out: dict[str, Any] = {"ready_s": round(time.monotonic() - begun, 1), "texts": [], "steps": []}
        out["device"] = engine.describe().get("device_name", "cpu")
        if args.speed:
            await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in prompts))
        out["tokens_a_second"] = {}
        begun = time.monotonic()
        for prompt in prompts:
            EveryStep.found = []
            out["texts"].append(list((await engine.generate(prompt, greedy)).token_ids))
            out["steps"].append(EveryStep.found)
        out["tokens_a_second"]["1"] = round(args.max_tokens * len(prompts) / (time.monotonic() - begun))
        for streams in (4, 16) if args.speed else ():
            work, best = [prompts[i % len(prompts)] for i in range(streams)], 0.0
            for _ in range(3):
                begun = time.monotonic()
                await asyncio.gather(*(engine.generate(prompt, greedy) for prompt in work))
                best = max(best, args.max_tokens * streams / (time.monotonic() - begun))
            out["tokens_a_second"][str(streams)] = round(best)
        out["drafts"] = [(each.drafted_tokens, each.accepted_tokens) for each in engine.statistics().drafts]
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=Path, nargs="+", required=True, help="folders with the names of methods")
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--texts", type=int, default=len(QUESTIONS))
    parser.add_argument("--speed", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() and args.device != "cpu" else "cpu"
    tokenizer = Tokenizer.load(resolve_model(EngineConfig.create(args.model, {})))
    target = None if args.speed else load_target(args.model, device, torch.float32)[0]
    prompts = [tokenizer.encode(CHAT[0].format(text) + CHAT[1]) for text in QUESTIONS[: args.texts]]
    if not args.speed:
        proposer.DraftHistory = EveryStep  # type: ignore[misc]
        choice.CostBudget = lambda most, growth: DraftBudget(16)  # type: ignore[misc,assignment]
    plain: list[list[int]] = []
    for folder in (None, *args.heads):
        how = "none" if folder is None else {"method": folder.name, "model": str(folder), "tokens": DRAFTED}
        result = asyncio.run(run(args, how, prompts))
        texts, steps = result.pop("texts"), result.pop("steps")
        result = {"head": folder.name if folder else "none", **result}
        if folder is None:
            plain = texts
        else:
            result["same_texts"] = [sum(a == b for a, b in zip(texts, plain, strict=True)), len(texts)]
        if folder is not None and not args.speed:
            judge, same, total, accepted = Reference(folder, target, device), 0, 0, 0
            for prompt, text, own in zip(prompts, texts, steps, strict=True):
                whole = [count for drafted, count in own if drafted == DRAFTED]
                wanted = judge.accepted([*prompt, *text], len(prompt))[: len(whole)]
                same += sum(a == b for a, b in zip(whole, wanted, strict=False))
                total, accepted = total + len(whole), accepted + sum(whole)
            result |= {"steps_as_the_reference": [same, total], "tokens_a_step": round(1 + accepted / total, 3)}
        print(json.dumps(result), flush=True)
        if args.out:
            with open(args.out, "a") as file:
                file.write(json.dumps(result) + "\n")


if __name__ == "__main__":
    main()
