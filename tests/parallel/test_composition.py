"""What composes with what: each cell of docs/composition.md is shown by a test, or refused by an error."""

from __future__ import annotations

import ast
import itertools
import random
import shutil
import sys
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from driver import CPU, source_of
from gguf import GGMLQuantizationType as Q
from lora_files import write_adapter
from pairs import some
from ranked_engine import RankedEngine
from scenarios import Engine, settings_of_torch_kept, states_kept_often
from searches import every_step_has_a_search  # noqa: F401
from test_divided_formats import GROUP_EXPERTS, LARGER, ROUTER
from test_divided_models import DELTA, EIGHT, EXPERTS, LAYER_TYPES
from test_expert_layers import mxfp4
from test_experts_of_replicas import STEPS, alone, together
from test_fp8_weights import write_quantised
from test_gguf_weights import SIZES, write_gguf
from test_group_weights import write as write_groups
from test_pipeline import Lines, Link, make_setup, random_requests, run
from test_weight_formats import quantise
from tiny import make_tiny_model

from aengine import errors
from aengine.checkpoint.early_checks import check_start
from aengine.checkpoint.sampling_defaults import SamplingDefaults
from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.pooling.requests import PoolingRequest
from aengine.engine.sampling_extras import extras_of
from aengine.engine.scheduler.request import CacheKey, PromptTokens, Request
from aengine.engine.scheduler.step import NOTHING_AHEAD, InFlightStep
from aengine.engine.speculation.drafts import Drafts
from aengine.engine.streams.prompt_logprobs import of_pieces
from aengine.engine.user_request import Limits, check_request
from aengine.ipc.messages import NO_RESULTS, GrammarOutput, int32
from aengine.params import CallOptions, SamplingParams, StructuredOutput
from aengine.runner.distributed.stage import WHOLE, PipelineStage
from aengine.runner.models import build_model, read_config
from aengine.runner.platforms.cpu import CpuPlatform
from aengine.runner.startup.draft import find_proposer
from aengine.runner.startup.encoder import load_encoder
from aengine.runner.startup.load import load_model
from aengine.runner.startup.policy import choose_policy
from aengine.runner.weights.formats import choose_formats
from aengine.workers.rank import ranks_of

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "scripts"))

import composition  # noqa: E402

TinyModel = Callable[..., Path]
MAX_TOKENS = 7


def features(rng: random.Random, vocab_size: int) -> dict[str, dict[str, Any]]:
    """What a request asks for, by the names of `composition.REQUESTS`."""
    ids = range(vocab_size)
    pairs = [[first, last] for first in ids for last in rng.sample(ids, 1)]
    return {
        "seeds and cutoffs": {"temperature": 1.0, "top_k": 30, "top_p": 0.9, "min_p": 0.001},
        "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.3},
        "`min_tokens`": {"min_tokens": 5, "stop_token_ids": rng.sample(ids, vocab_size // 3)},
        "`logit_bias`": {"logit_bias": dict.fromkeys(rng.sample(ids, 20), 2.0)},
        "`allowed_token_ids`": {"allowed_token_ids": rng.sample(ids, vocab_size // 2)},
        "`bad_words`": {"bad_words": [*pairs[: 2 * vocab_size // 3], *([i] for i in rng.sample(ids, 30))][:256]},
        "`extra_args`": {"extra_args": {"residues": {"modulus": 7}}},
        "`logprobs`": {"logprobs": 2},
        "`prompt_logprobs`": {"prompt_logprobs": 2},
        "`n`": {"n": 2},
        "grammars": {"grammar": object()},
    }


@dataclass
class Answer:
    token_ids: list[int]
    numbers: list[float]
    """The log-probabilities of its prompt and its tokens, or its vector."""


class Walk:
    """Requests of an engine without processes, each for a pair of features, alone and together."""

    def __init__(self, engine: Engine, rng: random.Random, shift: int) -> None:
        """``shift``: added to each token of the prompts."""
        self.engine, self.rng = engine, rng
        self.vocab_size = engine.offer["vocab_size"]
        common = [rng.randrange(self.vocab_size) for _ in range(24)]
        asked = features(rng, self.vocab_size)
        pairs = [*itertools.combinations(asked, 2), *((name, name) for name in asked)]
        self.asked = [asked[first] | asked[second] for first, second in pairs]
        self.asked[4:4] = [{"is_pooled": True} for _ in range(4)]
        prompts = [
            common[: rng.choice([0, 8, 24])] + [rng.randrange(self.vocab_size) for _ in range(rng.randint(1, 9))]
            for _ in self.asked
        ]
        self.prompts = [[(token_id + shift) % self.vocab_size for token_id in prompt] for prompt in prompts]

    def requests(self, place: int) -> list[Request]:
        fields = dict(self.asked[place])
        slot = self.engine.slot_of(place) if isinstance(self.engine, AdaptedEngine) else None
        adapter = {} if slot is None else {"lora": [int32([slot]).tobytes()]}
        key = CacheKey(adapter=str(slot).encode())
        if fields.get("is_pooled"):
            prompt, limit = self.prompts[place], len(self.prompts[place]) + 1
            limits: dict[str, Any] = {"seed": 0, "max_num_tokens": limit, "stop_token_ids": frozenset()}
            limits |= {"extras": {"pooling": [b"", bytes(4)]} | adapter, "cache_key": key}
            return [Request(str(place), prompt, SamplingParams(max_tokens=1), samples=False, **limits)]
        grammar, words = fields.pop("grammar", None), fields.pop("bad_words", ())
        params = SamplingParams(**{"temperature": 0.0, "max_tokens": MAX_TOKENS} | fields)
        prompt = PromptTokens(self.prompts[place])
        limits = {"max_num_tokens": len(prompt.token_ids) + MAX_TOKENS}
        how: dict[str, Any] = {"stop_token_ids": frozenset(params.stop_token_ids), "cache_key": key}
        how["extras"] = extras_of(params, words) | adapter
        ends = [0 if params.prompt_logprobs and not i else NO_RESULTS for i in range(params.n)]
        return [
            Request(
                *(str(place), prompt, params),
                **{"seed": place + i, "index": i, "grammar": grammar, "results_from": begin, **limits, **how},
            )
            for i, begin in enumerate(ends)
        ]

    def alone(self) -> list[list[Answer]]:
        self.engine.begin()
        return [self._run(self.requests(place), None) for place in range(len(self.asked))]

    def together(self, expected: list[list[Answer]]) -> tuple[list[list[Answer]], int]:
        """In chunks, with drafts of which some are wrong and some are found by the worker, in a pool that is too small,
        with the KV of who is preempted in the host's memory, and across a death."""
        budget = 24
        longest = max(map(len, self.prompts)) + MAX_TOKENS
        most = self.engine.fewest_blocks(longest, budget)
        self.engine.begin(num_blocks=most + 2, max_num_batched_tokens=budget)
        requests = [self.requests(place) for place in range(len(self.asked))]
        right = [answer.token_ids for answers in expected for answer in answers]
        scheduler = self.engine.scheduler
        scheduler.rows.lookahead = drafts = Drafts(scheduler.rows)
        found = self._run([one for some in requests for one in some], right)
        answers = iter(found)
        num_accepted = sum(each.accepted_tokens for each in drafts.statistics())
        return [[next(answers) for _ in some] for some in requests], num_accepted

    def _run(self, requests: list[Request], right: list[list[int]] | None) -> list[Answer]:
        scheduler, sent, death = self.engine.scheduler, deque(), 25 if right else -1
        numbers: dict[int, list[float]] = {id(each): [] for each in requests}
        for each in requests:
            scheduler.add_request(each)
        while sent or any(each.finish_reason is None for each in requests):
            gated = scheduler.newest_step is not None and scheduler.newest_step.is_gated
            out = scheduler.schedule() if len(sent) < 2 and not gated else None
            if out is not None:
                sent.append(out)
                continue
            death -= 1
            if death == 0:
                scheduler.preempt_all()
                sent.clear()
                self.engine.runner, _ = self.engine.model.allocate(self.engine._plan)
                continue
            self._answer(sent.popleft(), numbers)
            for each, token_ids in zip(requests, right or (), strict=bool(right)):
                if each.finish_reason is None:
                    begin = each.num_output_tokens + each.num_pending
                    wrong = self.rng.randrange(self.vocab_size)
                    guess = [i if self.rng.random() < 0.8 else wrong for i in token_ids[begin : begin + 3]]
                    is_found = each.grammar is None and self.rng.random() < 0.2
                    scheduler.rows.lookahead.propose(each, [-1] * len(guess) if is_found else guess)
        return [Answer(each.output_token_ids, numbers[id(each)]) for each in requests]

    def _answer(self, out: Any, numbers: dict[int, list[float]]) -> None:
        scheduler, runner = self.engine.scheduler, self.engine.runner
        step = scheduler.oldest_step
        assert step is not None and step.step_id == out.step_id
        runner.execute_model(out)
        answer = runner.sample_tokens(self._masks(step) if step.is_gated else None).get()
        if answer.results is not None:
            for batch_idx, piece in answer.results.items():
                each = step.batch[batch_idx]
                if not each.samples:
                    numbers[id(each)] = list(piece)
                elif each.finish_reason is None:
                    scored = of_pieces(piece, each.num_prompt_tokens)
                    numbers[id(each)] += [value.logprob for entry in scored for value in entry or ()]
        result = scheduler.update(answer)
        assert not result.failed, [error.message for _, error in result.failed]
        if answer.logprobs is not None:
            whose = {place: each for each, _, place in result.sampled}
            for place, value in zip(answer.logprobs.token_idx, answer.logprobs.sampled, strict=True):
                if place in whose:
                    numbers[id(whose[place])].append(value)

    def _masks(self, step: InFlightStep) -> GrammarOutput:
        """A grammar that forbids a fifth of the tokens, by all before."""
        positions, rows = int32(), []
        for batch_idx, each in step.constrained():
            ahead = step.ahead.get(batch_idx, NOTHING_AHEAD)
            drafts = ahead.token_ids
            for k in range(len(drafts) + 1 - ahead.num_samples, len(drafts) + 1):
                positions.append(batch_idx)
                size = 32 * ((self.vocab_size + 31) // 32)
                allowed = (np.arange(size) + sum(each.token_ids) + sum(drafts[:k])) % 5 != 0
                rows.append(np.packbits(allowed, bitorder="little").tobytes())
        return GrammarOutput(step.step_id, positions, b"".join(rows))


OF_MXFP4 = EIGHT | {"num_local_experts": 4, "intermediate_size": 64, "hidden_size": 64, "sliding_window": 7}


class AdaptedEngine(Engine):
    """Two of three requests have an adapter, each another."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        super().__init__(folder, max_loras=2, max_lora_rank=4, **settings)
        for slot in range(2):
            while (
                state := self.model.calls["load_lora"](slot, str(folder.parent / f"adapter{slot}")).get()
            ) == "loading":
                pass
            assert state == "ready"

    def slot_of(self, place: int) -> int | None:
        return (0, 1, None)[place % 3]


def model_of(kind: str, tiny_model: TinyModel, folder: Path) -> tuple[Path, dict[str, Any], type[Engine]]:
    """A tiny model of a kind of layers, of a format, or for a division: folder, settings, engine."""
    if kind == "sliding windows":
        return (
            tiny_model("qwen3", seed=7, sliding_window=9, use_sliding_window=True, layer_types=LAYER_TYPES),
            {},
            Engine,
        )
    if kind == "recurrent states":
        return (
            tiny_model("qwen3_5_text", seed=7, **DELTA),
            {"speculation": "suffix"},
            Engine,
        )  # so that there may be drafts
    if kind == "experts":
        return tiny_model("qwen3_moe", seed=7, **EIGHT, **EXPERTS), {}, Engine
    if kind == "by transformers' code":
        return tiny_model("llama", seed=7, **EIGHT), {"model_impl": "transformers"}, Engine
    if kind == "8-bit integers":
        copy = Path(shutil.copytree(tiny_model("llama", seed=7, **EIGHT), folder / "int8"))
        quantise(copy, "int-quantized")
        return copy, {}, Engine
    if kind == "4-bit integers":
        copy = Path(shutil.copytree(tiny_model("llama", seed=7, **LARGER), folder / "int4"))
        write_groups(copy, "int4, zeros")
        return copy, {}, Engine
    if kind == "FP8":
        copy = Path(shutil.copytree(tiny_model("llama", seed=7, **EIGHT), folder / "fp8"))
        write_quantised(copy, "channel")
        return copy, {}, Engine
    if kind == "MXFP4":
        copy = Path(shutil.copytree(tiny_model("gpt_oss", seed=7, **OF_MXFP4), folder / "mxfp4"))
        mxfp4(copy)
        return copy, {}, Engine
    if kind == "GGUF":
        path = folder / "tiny.gguf"
        write_gguf(path, make_tiny_model("llama", seed=7, **SIZES), "llama", [Q.Q8_0])
        return path, {}, Engine
    if kind == "`tensor_parallel_size`":
        return tiny_model("llama", seed=7, **EIGHT), {"tensor_parallel_size": 2}, RankedEngine
    return tiny_model("llama", seed=7, **EIGHT), {}, Engine


KEPT = "recurrent states", "experts", "GGUF", "`tensor_parallel_size`"  # a GGUF has full attention


def check_walk(kind: str, model: tuple[Path, dict[str, Any], type[Engine]], rng: random.Random, most: int = 0) -> None:
    """``most``: requests that may have other tokens together than alone. If more have, the walk is gone once more, with
    the same lengths and features, and other tokens in the prompts: where rounding has decided between two tokens, or
    two experts, that were as good as equal, as in one walk of some thousand, it will not do so again."""
    seed = rng.getrandbits(32)
    others = _others_together(kind, model, random.Random(seed), 0)
    if len(others) > most:
        print("at first:", others)
        others = _others_together(kind, model, random.Random(seed), 1)
    assert len(others) <= most, others


def _others_together(
    kind: str, model: tuple[Path, dict[str, Any], type[Engine]], rng: random.Random, shift: int
) -> list[tuple[dict[str, Any], list[Answer], list[Answer]]]:
    folder, settings, engine_class = model
    with settings_of_torch_kept(), states_kept_often():
        processors = ["callers_processors:Residues"]
        engine = engine_class(folder, swap_space_bytes=1 << 20, logits_processors=processors, **settings)
        walk = Walk(engine, rng, shift)
        alone = walk.alone()
        together, num_accepted = walk.together(alone)
    assert num_accepted > 0
    return [
        (fields, expected, found)
        for fields, expected, found in zip(walk.asked, alone, together, strict=True)
        if [answer.token_ids for answer in found] != [answer.token_ids for answer in expected]
        or [answer.numbers for answer in found] != [pytest.approx(answer.numbers, abs=1e-3) for answer in expected]
    ]


@pytest.mark.parametrize("kind", some(composition.WALKED, *KEPT))
def test_requests(kind: str, tiny_model: TinyModel, tmp_path: Path, rng: random.Random) -> None:
    """Every pair of features, in every kind of model: beside all others, with drafts, and after deaths and preemptions
    the tokens are those that the request has alone."""
    check_walk(kind, model_of(kind, tiny_model, tmp_path), rng)


@pytest.mark.parametrize("kind", some(composition.WALKED_IN_CODES, "sliding windows"))
def test_requests_of_fp8_keys_and_values(kind: str, tiny_model: TinyModel, tmp_path: Path, rng: random.Random) -> None:
    """The same of keys and values in FP8. One that is in the middle between two codes, but for rounding, may be kept as
    either, and does so in one of some hundred requests."""
    folder, settings, engine_class = model_of(kind, tiny_model, tmp_path)
    check_walk(kind, (folder, {**settings, "kv_cache_dtype": "fp8"}, engine_class), rng, 3)


@pytest.mark.parametrize("kind", some(composition.WALKED_WITH_ADAPTERS, "sliding windows"))
def test_requests_with_adapters(kind: str, tiny_model: TinyModel, tmp_path: Path, rng: random.Random) -> None:
    """The same of requests of which two of three have adapters."""
    given, settings, _ = model_of(kind, tiny_model, tmp_path)
    model = tmp_path / "own" / given.name
    model.parent.mkdir()
    (shutil.copytree if given.is_dir() else shutil.copy)(given, model)
    plain = {"GGUF": ("llama", SIZES), "4-bit integers": ("llama", LARGER), "MXFP4": ("gpt_oss", OF_MXFP4)}
    arch, sizes = plain.get(kind, ("", {}))
    names = tiny_model(arch, seed=7, **sizes) if arch else model
    for slot, rank in enumerate((4, 3)):
        write_adapter(model.parent / f"adapter{slot}", names, rng, rank, is_stacked=slot == 1)
    if kind in ("experts", "MXFP4"):
        settings["max_lora_expert_rank"] = 4
    check_walk(kind, (model, settings, AdaptedEngine), rng)


@pytest.mark.parametrize("kind", composition.FORMATS)
def test_stages_read_their_part(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    model, _, _ = model_of(kind, tiny_model, tmp_path)
    source = source_of(model)
    vocab_size = read_config(source.hf_config).vocab_size
    with torch.inference_mode():
        wanted = run([make_setup(source, WHOLE, None)], random_requests(vocab_size, 11), 1)
        lines = Lines(2)
        stages = [make_setup(source, PipelineStage(i, 2), Link(lines, i)) for i in range(2)]
        assert run(stages, random_requests(vocab_size, 11), 2) == wanted


@pytest.mark.parametrize("kind", composition.FORMATS)
def test_shared_experts_of_a_format(kind: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    if kind == "MXFP4":
        model, _, _ = model_of(kind, tiny_model, tmp_path)
    elif kind == "GGUF":
        model, sizes = tmp_path / "tiny.gguf", {**SIZES, **EXPERTS, "moe_intermediate_size": 64}
        write_gguf(model, make_tiny_model("qwen3_moe", seed=7, **sizes), "qwen3_moe", [Q.Q8_0])
    else:
        model = Path(shutil.copytree(tiny_model("qwen3_moe", seed=7, **GROUP_EXPERTS), tmp_path / "model"))
        if kind == "8-bit integers":
            quantise(model, "int-quantized", ROUTER)
        elif kind == "4-bit integers":
            write_groups(model, "int4, zeros")
        elif kind == "FP8":
            write_quantised(model, "channel")
    source = source_of(model)
    for replica, (steps, found) in enumerate(zip(STEPS, together(source, STEPS), strict=True)):
        for logits, expected in zip(found, alone(source, replica, steps), strict=True):
            assert float((logits - expected).abs().max()) <= 1e-4 * float(expected.abs().max())


FIELDS: dict[str, dict[str, Any]] = {
    "seeds and cutoffs": {"temperature": 1.0},
    "penalties": {"presence_penalty": 0.4},
    "`min_tokens`": {"min_tokens": 1},
    "`logit_bias`": {"logit_bias": {5: 1.0}},
    "`allowed_token_ids`": {"allowed_token_ids": [5]},
    "`bad_words`": {"bad_words": ["x"]},
    "`extra_args`": {"extra_args": {"residues": {"modulus": 7}}},
    "`logprobs`": {"logprobs": 1},
    "`prompt_logprobs`": {"prompt_logprobs": 1},
    "`n`": {"n": 2},
    "grammars": {"structured_output": StructuredOutput(regex="a")},
    composition.DRAFTS: {},
}


def ask(row: str, column: str, tiny_model: TinyModel) -> Any:
    """Do what the cell refuses, without a process."""
    pair = {row, column}
    if composition.VECTORS in pair:
        (other,) = pair - {composition.VECTORS}
        return PoolingRequest("embed", ["x"], options=FIELDS[other])
    if row == composition.ADAPTERS:
        settings: dict[str, Any] = {"max_loras": 1, "device": "cpu", "num_threads": 1}
        config = EngineConfig.create(str(tiny_model("llama")), settings)
        (rank,) = ranks_of(config)
        source = resolve_model(config).to_wire()  # an encoder is refused before its files are read
        source["hf_config"] = {"model_type": "bert", "architectures": ["BertModel"]}
        return load_model(config, source, rank, lambda *report: None)
    if row == composition.INVARIANT:
        return ask_invariant(column, tiny_model)
    if row in composition.REQUESTS:
        defaults = SamplingDefaults({})
        limits = Limits(320, 64, 1, False, frozenset(), None, defaults, frozenset({"embed"}), is_encoder=True)
        return check_request(limits, True, "text", SamplingParams(**FIELDS[row]), CallOptions())
    sizes: dict[str, dict[str, Any]] = {
        composition.TENSOR: {"tensor_parallel_size": 2},
        composition.PIPELINE: {"pipeline_parallel_size": 2},
        composition.SHARED: {"data_parallel_size": 2, "enable_expert_parallel": True},
        composition.RAY: {"executor": "ray"},
    }
    settings = {"device": "cpu", "num_threads": 1}
    if composition.FOREIGN in pair:
        settings["model_impl"] = "transformers"
    for name in pair & sizes.keys():
        settings |= sizes[name]
    if row == composition.TIERS:
        settings["kv_tiers"] = "host:1MB"
    is_dense = column == composition.SHARED and row not in ("experts", composition.FOREIGN)
    if row in composition.DRAFTED_BY:
        methods = {composition.DRAFT_MODEL: "draft_model", composition.HEADS: "eagle3", composition.MTP: "mtp"}
        settings["speculation"] = {"method": methods[row]} | ({} if row == composition.MTP else {"model": "any"})
    folder = tiny_model("llama") if is_dense else tiny_model("qwen3_moe", seed=7, **EIGHT, **EXPERTS)
    config = EngineConfig.create(str(folder), settings)
    source = resolve_model(config)
    check_start(config, source.hf_config)
    find_proposer(config)
    rank = ranks_of(config)[0]
    if row == composition.ENCODERS:
        return load_encoder(config, source.to_wire(), rank, lambda *report: None)
    whole = read_config(source.hf_config, model_impl=config.model_impl, folder=source.path)
    own = whole.of_rank(rank.tp_size, divides_experts=config.enable_expert_parallel, num_replicas=rank.num_sharing)
    return build_model(own, choose_formats("float32", CPU), stage=PipelineStage(rank.pp_rank, rank.pp_size))


def ask_invariant(column: str, tiny_model: TinyModel) -> Any:
    asked: dict[str, dict[str, Any]] = {
        composition.TENSOR: {"tensor_parallel_size": 2},
        composition.FOREIGN: {"model_impl": "transformers"},
        composition.ADAPTERS: {"max_loras": 1},
    }
    settings = {"device": "cpu", "num_threads": 1, "batch_invariant": True} | asked.get(column, {})
    folder = tiny_model("qwen3_next" if column == composition.STATES else "llama")
    config = EngineConfig.create(str(folder), settings)
    source = resolve_model(config)
    if column == composition.ENCODERS:
        return load_encoder(config, source.to_wire(), ranks_of(config)[0], lambda *report: None)
    check_start(config, source.hf_config)
    model = read_config(source.hf_config, model_impl=config.model_impl, folder=source.path)
    return choose_policy(config, model, CpuPlatform(), "float32")


REFUSED = [cell for cell in composition.cells() if cell.error]


@pytest.mark.parametrize("cell", REFUSED, ids=lambda cell: f"{cell.row} {cell.column}")
def test_what_is_refused(cell: composition.Cell, tiny_model: TinyModel) -> None:
    kind: type[Exception] = getattr(errors, cell.error)
    with settings_of_torch_kept(), pytest.raises(kind) as caught:
        ask(cell.row, cell.column, tiny_model)
    assert type(caught.value) is kind and str(caught.value)


def test_every_cell_is_shown_by_a_test_or_refused_by_an_error() -> None:
    def is_there(name: str) -> bool:
        path, _, function = name.partition("::")
        tree = ast.parse((ROOT / path).read_text())
        found = ast.FunctionDef | ast.AsyncFunctionDef
        return any(isinstance(node, found) and node.name == function for node in tree.body)

    cells = list(composition.cells())
    assert len(cells) > 250 and all(cell.tests for cell in cells)
    names = {name for cell in cells for name in cell.tests}
    assert not {name for name in names if not is_there(name)}


def test_the_page_has_the_table() -> None:
    page = (ROOT / "docs" / "composition.md").read_text()
    assert page.endswith(composition.as_markdown()), "run python scripts/composition.py"
