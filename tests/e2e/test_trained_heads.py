"""Heads that draft in the engine: as often right as their references say."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import signal
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_every_architecture import (
    MIB,
    VOCAB_SIZE,
    Model,
    models,
    one_thread,
    running,
)  # finds the folder of the models
from test_speculation_workers import answers, any_cost
from torch import Tensor

from aengine import SamplingParams
from aengine.engine.scheduler.request import Request
from aengine.engine.speculation import proposer
from aengine.engine.speculation.history import NONE_CANCELLABLE, DraftHistory, Guess, PendingTokens

# isort: split
from draft_heads import DFlash, DraftHead, Eagle3, Mtp, PEagle
from test_draft_heads import ANY_LAYERS, DFLASH, EAGLE3, PEAGLE, randomise, write_head
from tiny import load_reference

__all__ = ["any_cost", "models", "one_thread"]  # fixtures

TOKENS, DRAFTED = 48, 3
KINDS: dict[str, type[DraftHead]] = {"eagle3": Eagle3, "peagle": PEagle, "dflash": DFlash, "mtp": Mtp}
WITH_OTHERS = "dflash"
"""Whose engine has other requests, too: seeded, preempted, and of a worker that dies. `test_speculation_states` has
them for other kinds, `test_draft_models` with a worker that dies."""
APART = {Eagle3: EAGLE3 | ANY_LAYERS, PEagle: PEAGLE | ANY_LAYERS, DFlash: DFLASH}


def trained(judge: DraftHead, captured: Tensor, ids: Tensor) -> None:
    """Teach the head a text by heart, most of it."""
    rows = len(ids) - 1 - DRAFTED
    forced = [ids[1 + step : rows + 1 + step] for step in range(DRAFTED + 1)]
    optimizer = torch.optim.Adam(judge.parameters(), lr=3e-3)
    for _ in range(14):
        logits, _ = judge.roll_out(captured[:rows], forced[0], DRAFTED, forced[1:])
        loss = sum(torch.nn.functional.cross_entropy(own, right) for own, right in zip(logits, forced[1:], strict=True))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()


def num_accepted(judge: DraftHead, captured: Tensor, ids: Tensor, num_prompt: int) -> list[int]:
    """How many drafts each step of speculation over a greedy text accepts."""
    with torch.inference_mode():
        _, drafts = judge.roll_out(captured[:-1], ids[1:], DRAFTED)
    found, place = list[int](), num_prompt + 1  # the last token's: the step behind the prompt's has no drafts
    while len(ids) - 1 - place > 1:
        most = min(DRAFTED, len(ids) - 2 - place)
        right = [int(drafts[j][place - 1]) == int(ids[place + 1 + j]) for j in range(most)]
        found.append((right + [False]).index(False))
        place += found[-1] + 1
    return found


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "num_ranks"), [("eagle3", 2), ("peagle", 1), ("dflash", 2), ("mtp", 1)])
async def test_a_head_is_right_as_often_as_its_reference(
    kind: str,
    num_ranks: int,
    models: Callable[[str], Model],
    tmp_path: Path,
    rng: random.Random,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found: list[tuple[int, int]] = []  # tokens drafted and accepted, of each step

    class EveryStep(DraftHistory):
        """Guesses whatever came of it."""

        def note_verified(self, request: Request, num_drafted: int, num_accepted: int) -> None:
            found.append((num_drafted, num_accepted))

        def guess(self, request: Request, most: int, pending: PendingTokens = NONE_CANCELLABLE) -> Guess:
            return Guess([-1] * min(most, DRAFTED), [0.9] * min(most, DRAFTED))

    monkeypatch.setattr(proposer, "DraftHistory", EveryStep)
    model, made = models("qwen2" if kind == "mtp" else "llama"), KINDS[kind]
    prompt = [rng.randrange(VOCAB_SIZE) for _ in range(20)]
    greedy = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True)
    few: dict[str, Any] = {"max_leased_steps": 0, "kv_cache_memory_bytes": MIB // 4, "max_num_seqs": 6}
    async with running(model, **few) as engine:
        own = (await engine.generate(prompt, greedy)).token_ids
        others = await answers(engine, 3) if kind == WITH_OTHERS else None
    ids = torch.tensor([*prompt, *own])
    judge, captured = made_for(model, made, ids)
    randomise(judge, rng)
    wanted = [0]
    while not any(wanted):
        trained(judge, captured, ids)
        wanted = num_accepted(judge, captured, ids, len(prompt))
    assert sum(wanted) < DRAFTED * len(wanted)
    write = write_with_target if made is Mtp else write_apart
    target, how = write(tmp_path, model.folder, judge)
    model = copy(model)
    model.folder = target
    few |= {"tensor_parallel_size": num_ranks, "speculation": how | {"tokens": DRAFTED}}
    async with running(model, **few) as engine:
        assert (await engine.generate(prompt, greedy)).token_ids == own
        steps, drafted = len(found), engine.statistics().drafted_tokens
        if others is not None:
            task = asyncio.create_task(answers(engine, 3))
            while engine.statistics().drafted_tokens < drafted + 60:
                await asyncio.sleep(0.001)
            os.kill(engine.describe()["pid"], signal.SIGKILL)
            assert await task == others and engine.statistics().num_restarts == 1
    del found[steps:]
    whole = [accepted for drafted, accepted in found if drafted == DRAFTED]  # the last tokens leave no place for all
    assert whole == wanted[: len(whole)] and len(whole) > len(wanted) // 2


@torch.no_grad()
def made_for(model: Model, made: type[DraftHead], ids: Tensor) -> tuple[DraftHead, Tensor]:
    """A head for a model, and what it reads of a text, [len(ids), size]."""
    reference = load_reference(model.folder, "qwen2" if made is Mtp else "llama")
    hf = json.loads((model.folder / "config.json").read_text())
    settings = {**hf, "head_dim": hf["hidden_size"] // hf["num_attention_heads"], "rope_theta": 10000.0}
    settings |= {"rope_parameters": None, "num_hidden_layers": 1, "attention_bias": made is Mtp, "mlp_bias": False}
    settings |= APART.get(made, {"num_nextn_predict_layers": 1}) | {"draft_vocab_size": VOCAB_SIZE}
    found: list[Tensor] = []  # the residual stream behind the last layer, which transformers does not return
    hook = reference.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0][0]))
    states = [one[0] for one in reference(ids[None], output_hidden_states=True).hidden_states]
    hook.remove()
    captured = states[-1] if made is Mtp else torch.cat((states[made is DFlash], states[2], found[0]), 1)
    return made(settings, reference.get_input_embeddings().weight, reference.lm_head.weight), captured


def write_apart(folder: Path, target: Path, judge: DraftHead) -> tuple[Path, dict[str, Any]]:
    """Write the head as a checkpoint. Returns the target's folder, and the setting."""
    method = next(name for name, kind in KINDS.items() if kind is type(judge))
    return target, {"method": method, "model": str(write_head(folder / "head", judge))}


def write_with_target(folder: Path, target: Path, judge: DraftHead) -> tuple[Path, dict[str, Any]]:
    """Write the head as a part of the target's checkpoint, which is MiMo's then. See `write_apart`."""
    own = folder / "mimo"
    shutil.copytree(target, own)
    tensors = {judge.prefix + name: tensor.contiguous() for name, tensor in judge.state_dict().items()}
    save_file(load_file(own / "model.safetensors") | tensors, own / "model.safetensors")
    hf = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(hf | {"model_type": "mimo", "num_nextn_predict_layers": 1}))
    return own, {"method": "mtp"}
