"""A model in every situation that an engine brings it into, in one process: the scheduler, the model runner and the
worker's own loading of a checkpoint, without processes or rings.

    check_scenarios(folder, reference)

runs the same greedy requests alone, batched, after prefix hits, chunked and preempted, and across a worker's death, and
compares each token with the reference's. That takes a second or two for a tiny model in float32.
"""

from __future__ import annotations

import random
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from scheduler_invariants import check_scheduler
from torch import Tensor

from aengine.checkpoint.source import resolve_model
from aengine.config import EngineConfig
from aengine.engine.scheduler.prefixes import kept_states
from aengine.engine.scheduler.request import Request
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.scheduler.swapped_requests import SwappedRequests
from aengine.ipc.messages import KVCacheGroup, kv_capacity
from aengine.params import SamplingParams
from aengine.runner.startup.load import LocalModel, load_model
from aengine.workers.rank import ranks_of

MAX_TOKENS = 12
MAX_MODEL_LEN = 96
BLOCK_SIZE = 4
MIB = 2**20
PROMPTS = [list(range(100, 100 + n)) for n in (1, 17, 40, 60)]

Reference = Callable[[Tensor], Tensor]
"""float32 [n, vocab_size] logits for the int64 [n] tokens of one sequence."""


def reference_of(model: Any) -> Reference:
    """What one of transformers' models says about a sequence that is alone."""

    @torch.inference_mode()
    def logits(token_ids: Tensor) -> Tensor:
        return model(input_ids=token_ids[None].to(model.device), use_cache=False).logits[0].float().cpu()

    return logits


class Engine:
    """A loaded model, with a scheduler and a runner for each `begin`. Not for threads."""

    def __init__(self, folder: Path, **settings: Any) -> None:
        settings = {
            "dtype": "float32",
            "device": "cpu",
            "max_model_len": MAX_MODEL_LEN,
            "block_size": BLOCK_SIZE,
            "num_threads": 1,
            "max_num_seqs": 16,
            "kv_cache_memory_bytes": 16 * MIB,
        } | settings
        self.config = EngineConfig.create(str(folder), settings)
        self.model = self._load(resolve_model(self.config).to_wire())
        self.offer = self.model.offer
        self.groups = KVCacheGroup.from_ready(dict(self.offer))
        self.num_restored = 0  # pages of preempted requests that came back from the host's memory

    def _load(self, source: dict[str, Any]) -> LocalModel | Any:
        (rank,) = ranks_of(self.config)
        return load_model(self.config, source, rank, _no_progress)

    def begin(self, *, num_blocks: int | None = None, max_num_batched_tokens: int = 512) -> None:
        """Start anew: an empty cache, no request."""
        self._plan = {key: value for key, value in self.offer.items() if isinstance(value, int)}
        self._plan["num_blocks"] = num_blocks or self.offer["num_blocks"]
        self.runner, facts = self.model.allocate(self._plan)
        num_places = facts["num_swap_pages"]
        self.scheduler = Scheduler(
            num_blocks=self._plan["num_blocks"],
            kv_groups=self.groups,
            max_num_seqs=self.config.max_num_seqs,
            max_num_batched_tokens=max_num_batched_tokens,
            max_model_len=self.offer["max_model_len"],
            vocab_size=self.offer["vocab_size"],
            rope_border=self.offer["rope_border"],
            preempted=SwappedRequests(num_places, self.groups) if num_places else None,
        )
        self._answers: list[Any] = []
        self.numbers: dict[Request, array[float]] = {}  # the pieces of the results of requests that get them

    def fewest_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Pages that hold one request of ``num_tokens``."""
        count = 1
        while kv_capacity(self.groups, count, num_tokens, step_tokens) < num_tokens:
            count += 1
        return count

    def add(self, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[Request]:
        params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
        requests = []
        for i, prompt in enumerate(prompts):
            longest, none = len(prompt) + max_tokens, frozenset[int]()
            requests.append(Request(str(i), prompt, params, seed=0, max_num_tokens=longest, stop_token_ids=none))
            self.scheduler.add_request(requests[-1])
        return requests

    def run(self, most_steps: int = 10_000) -> None:
        """Until everything has ended, with two steps in flight as in the engine; or for some steps."""
        for _ in range(most_steps):
            while len(self._answers) < 2:
                step = self.scheduler.schedule()
                if step is None:
                    break
                num_blocks = self.scheduler.num_blocks
                self.num_restored += sum(page >= num_blocks for page in step.page_copies[::2])
                self.runner.execute_model(step)
                self._answers.append(self.runner.sample_tokens(None))
            if not self._answers:
                check_scheduler(self.scheduler)
                return
            result = self.scheduler.update(self._answers.pop(0).get())
            assert not result.failed, [error.message for _, error in result.failed]
            for request, piece in result.results:
                self.numbers.setdefault(request, array("f")).extend(piece)

    def die(self) -> None:
        """Lose the runner and all answers in flight; another one takes over."""
        assert not self.scheduler.preempt_all()
        self._answers.clear()
        self.runner, _ = self.model.allocate(self._plan)

    def generate(self, prompts: Sequence[Sequence[int]], max_tokens: int = MAX_TOKENS) -> list[list[int]]:
        requests = self.add(prompts, max_tokens)
        self.run()
        return [request.output_token_ids for request in requests]


class Judge:
    """Checks greedy completions against a reference: by induction each token must be the likeliest, or all but."""

    def __init__(self, reference: Reference, most: float = 1e-4) -> None:
        """``most``: by how much, in log-probability, a token may be less likely: two this close are one to float32 in
        another order of summation."""
        self._reference = reference
        self._most = most
        self._right: set[tuple[int, ...]] = set()

    def check(self, what: str, prompts: Sequence[Sequence[int]], outputs: Sequence[Sequence[int]]) -> None:
        for prompt, output in zip(prompts, outputs, strict=True):
            ids = (*prompt, -1, *output)
            if ids in self._right:
                continue
            logits = self._reference(torch.tensor([*prompt, *output]))[len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits, -1)
            best = logprobs.max(-1)
            for i, token_id in enumerate(output):
                gap = float(best.values[i] - logprobs[i, token_id])
                assert gap <= self._most, (
                    f"{what}, prompt of {len(prompt)}, output position {i}: {token_id} instead of "
                    f"{int(best.indices[i])}, {gap:.2g} less likely"
                )
            self._right.add(ids)


def some_prompts(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Lengths from 1 to 60; three begin like one another, to whole blocks and within one."""
    rng = random.Random(seed)

    def some(count: int) -> list[int]:
        return [rng.randrange(3, vocab_size) for _ in range(count)]

    shared = some(40)
    prompts = [some(length) for length in (1, 2, 7, 23, 60)]
    return prompts + [shared, shared[:24] + some(5), shared[:30] + some(20)]


def check_exactly(engine: Engine) -> list[list[int]]:
    """Tokens of an engine that has begun are the same alone, batched, in chunks of prompts and after preemptions,
    whatever the rounding. Returns them."""
    alone = [engine.generate([prompt])[0] for prompt in PROMPTS]
    engine.begin()
    assert engine.generate(PROMPTS) == alone
    engine.begin(max_num_batched_tokens=7)
    assert engine.generate(PROMPTS) == alone
    engine.begin(num_blocks=engine.fewest_blocks(100, 7) + 2, max_num_batched_tokens=7)
    assert engine.generate(PROMPTS) == alone
    return alone


def check_scenarios(
    folder: Path,
    reference: Reference | Any,
    *,
    most: float = 1e-4,
    max_tokens: int = MAX_TOKENS,
    prompts: Sequence[Sequence[int]] | None = None,
    engine_class: type[Engine] = Engine,
    **settings: Any,
) -> Engine:
    """Every scenario, for the model in ``folder``. Returns the engine, for more.

    Args:
        reference: a `Reference`, or one of transformers' models, of the same weights in float32
        settings: of the engine
    """
    judge = Judge(reference if not isinstance(reference, torch.nn.Module) else reference_of(reference), most)
    with settings_of_torch_kept(), states_kept_often():
        engine = engine_class(folder, **settings)
        texts = some_prompts(engine.offer["vocab_size"]) if prompts is None else [list(p) for p in prompts]
        engine.begin()
        judge.check("batched", texts, engine.generate(texts, max_tokens))
        _check_prefix_hits(engine, judge, texts, max_tokens)
        engine.begin()
        for text in texts[::3]:
            judge.check("alone", [text], engine.generate([text], max_tokens))
        _check_small_pool(engine, judge, texts, max_tokens)
        _check_death(engine, judge, texts, max_tokens)
    return engine


def _check_prefix_hits(engine: Engine, judge: Judge, texts: list[list[int]], max_tokens: int) -> None:
    """The same prompts again, then conversations that go on; the cache holds all of them."""
    scheduler = engine.scheduler
    before = scheduler.prefix_cache_hits
    again = engine.generate(texts, max_tokens)
    judge.check("after a prefix hit", texts, again)
    longer = [[*text, *output, 5, 3] for text, output in zip(texts, again, strict=True) if len(text) < 50]
    judge.check("a conversation that goes on", longer, engine.generate(longer, max_tokens))
    kinds, largest = {group.kind for group in engine.groups}, engine.offer["block_size"]
    if kinds == {"full"} or (kinds == {"full", "state"} and largest <= 2 * BLOCK_SIZE):
        assert scheduler.prefix_cache_hits - before > sum(map(len, texts)) // 2


def _check_small_pool(engine: Engine, judge: Judge, texts: list[list[int]], max_tokens: int) -> None:
    """Steps of a few tokens, in a pool for hardly more than the longest request; short ones begin together and grow."""
    budget = 16
    texts = [text[i : i + 3] for i, text in enumerate(texts[-3:] * 2)] + texts
    longest = max(map(len, texts)) + max_tokens
    engine.begin(num_blocks=engine.fewest_blocks(longest, budget) + 2, max_num_batched_tokens=budget)
    judge.check("chunked and preempted", texts, engine.generate(texts, max_tokens))
    if all(group.kind == "full" for group in engine.groups):
        assert engine.scheduler.rows.num_preemptions > 0


def _check_death(engine: Engine, judge: Judge, texts: list[list[int]], max_tokens: int) -> None:
    engine.begin(max_num_batched_tokens=32)
    requests = engine.add(texts, max_tokens)
    engine.run(most_steps=9)
    assert any(request.finish_reason is None and request.num_output_tokens for request in requests)
    engine.die()
    engine.run()
    judge.check("after a death", texts, [request.output_token_ids for request in requests])


@contextmanager
def states_kept_often() -> Iterator[None]:
    """States are kept at nearly every border, so that these short prompts find them."""
    interval, kept_states.STATE_INTERVAL = kept_states.STATE_INTERVAL, BLOCK_SIZE
    try:
        yield
    finally:
        kept_states.STATE_INTERVAL = interval


@contextmanager
def settings_of_torch_kept() -> Iterator[None]:
    """Loading a model sets what is a worker's own in its process."""
    threads, grad = torch.get_num_threads(), torch.is_grad_enabled()
    try:
        yield
    finally:
        torch.set_num_threads(threads)
        torch.set_grad_enabled(grad)


def _no_progress(stage: str, done: int, total: int, unit: str) -> None:
    pass
