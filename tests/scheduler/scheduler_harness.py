"""A model of the worker that checks everything it is told, and a driver that plays host.

The model keeps, for each slot of KV memory, a number that stands for the whole chain of tokens up to it. So whoever
attends to a wrong, stale or unwritten slot is found out at once, and a sampled token depends on all that was attended.
Each KV group has slots of its own for every token, and attends to as many of them as its window has. All slots of a
sequence of more tokens than the rope border hold other numbers than those of a shorter one. ``media``: the number of an
image at each position that has one, on which that slot and all later ones depend.
"""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import zip_longest
from typing import Any

from scheduler_invariants import check_scheduler

from aengine.engine.keeping.keeping import blocks_to_keep
from aengine.engine.keeping.kept_blocks import KeptBlocks, KeptHits
from aengine.engine.pacing.multi_step import undo_steps
from aengine.engine.scheduler.request import CacheKey, Request, RequestStatus
from aengine.engine.scheduler.scheduler import Scheduler
from aengine.engine.scheduler.swapped_requests import SwappedRequests
from aengine.engine.scheduler.waiting_queue import ServingOrder
from aengine.engine.speculation.drafts import Drafts
from aengine.engine.tiers.kv_tiers import KVTiers, PageJob
from aengine.ipc.messages import (
    KV_LOST,
    Kind,
    KVCacheGroup,
    ModelRunnerOutput,
    NewRequest,
    RowError,
    SchedulerOutput,
    int32,
    pack,
    unpack,
)
from aengine.outputs import FinishReason
from aengine.params import SamplingParams

VOCAB = 50
STOP_ID = 0


def extend(chain: int, token_id: int, position: int) -> int:
    return hash((chain, token_id, position))


def sample(chain: int, seed: int, position: int) -> int:
    return hash((chain, seed, position)) % VOCAB


def expected_output(
    prompt: list[int],
    seed: int,
    max_num_tokens: int,
    min_tokens: int = 0,
    border: int | None = None,
    media: dict[int, int] = {},  # noqa: B006 - nobody changes it
) -> list[int]:
    """What a request alone gets, computed the plain way."""
    tokens = list(prompt)
    while len(tokens) < max_num_tokens:
        chain = int(border is not None and len(tokens) > border)
        for position, token_id in enumerate(tokens):
            chain = extend(chain, token_id + VOCAB * media.get(position, 0), position)
        tokens.append(sample(chain, seed, len(tokens)))
        if tokens[-1] == STOP_ID and len(tokens) > len(prompt) + min_tokens:
            break
    return tokens[len(prompt) :]


Table = dict[int, int]
"""Index of a block in its sequence: block id. What has left a window may still be there."""


def first_needed(group: KVCacheGroup, position: int) -> int:
    """Index of the first block that a query at ``position`` reads."""
    return max(0, position - group.window + 1) // group.block_size if group.window else 0


def tables_of(new: NewRequest, groups: Sequence[KVCacheGroup]) -> list[Table]:
    ids, tables = list(new.block_ids), []
    spans = list(new.block_spans) or [0, len(ids)]
    assert len(spans) == 2 * len(groups)
    for begin, count in zip(spans[::2], spans[1::2]):
        tables.append({begin + i: ids.pop(0) for i in range(count)})
    return tables


def growth_of(out: SchedulerOutput) -> list[tuple[int, int, int]]:
    """(row, group, block id) of each block that a row was given."""
    return [
        (row, group, i) for row, i, group in zip_longest(out.block_rows, out.block_ids, out.block_groups, fillvalue=0)
    ]


def append(table: Table, block: int) -> None:
    table[max(table, default=-1) + 1] = block


@dataclass
class Row:
    tokens: list[int]
    num_computed: int
    tables: list[Table]  # of each KV group
    seed: int
    is_long: bool  # it was begun with more tokens than the rope border
    media: dict[int, int]
    failed: str = ""  # the type of the error that all its steps have
    num_unsettled: int = 0  # drafts that were rejected, as far as no step has said so


@dataclass
class Worker:
    groups: Sequence[KVCacheGroup]
    border: int | None = None
    rows: dict[int, Row] = field(default_factory=dict)
    kv: dict[int, dict[int, tuple[int, int]]] = field(default_factory=dict)
    """block: {offset: (group, chain)}, written ones only"""
    num_blocks: int = 1 << 30  # numbers from here on are places in the host's memory
    num_restored: int = 0  # pages that came back from there
    fail_next: bool = False
    lose_next: bool = False  # the next request that comes back from there finds nothing
    num_lost: int = 0
    num_computed: int = 0
    num_accepted: int = 0  # drafts

    def execute(self, out: SchedulerOutput) -> ModelRunnerOutput:
        for row, num_rejected in zip(out.settled_rows, out.num_rejected, strict=True):
            self.rows[row].num_unsettled -= num_rejected
            assert self.rows[row].num_unsettled >= 0, "settled more than was rejected"
        for row in out.removed:
            del self.rows[row]  # told once, and only of rows in use
        copies = list(zip(out.page_copies[::2], out.page_copies[1::2], strict=True))
        for source, target in copies:
            if target >= self.num_blocks:
                self.kv[target] = dict(self.kv[source])
        for new in out.new_requests:
            self._add(new)
        for row_idx, group, block in growth_of(out):
            append(self.rows[row_idx].tables[group], block)
            self.kv[block] = {}
        for source, target in copies:
            if target < self.num_blocks:
                self.kv[target] = dict(self.kv[source])
                self.num_restored += source >= self.num_blocks
        back = {target for source, target in copies if source >= self.num_blocks}
        for new in out.new_requests if self.lose_next else ():
            if not back.isdisjoint(new.block_ids):
                self.lose_next, self.rows[new.req_idx].failed = False, KV_LOST
                self.num_lost += 1
        assert len(set(out.req_idx)) == len(out.req_idx)
        kept: dict[int, dict[int, list[tuple[int, int]]]] = {}  # row: {tokens of this step: groups and pages}
        for row_idx, count, group, page in zip(*(out.kept_states[i::4] for i in range(4)), strict=True):
            assert self.groups[group].kind == "state"
            kept.setdefault(row_idx, {}).setdefault(count, []).append((group, page))
        assert kept.keys() <= set(out.req_idx)
        answer = ModelRunnerOutput(out.step_id, int32(), counts=None if out.drafts is None else int32())
        start = 0
        for batch_idx, (row_idx, count) in enumerate(zip(out.req_idx, out.num_scheduled_tokens, strict=True)):
            row = self.rows[row_idx]
            stop = start + (0 if out.drafts is None else out.drafts.counts[batch_idx])
            drafts = [] if out.drafts is None else list(out.drafts.token_ids[start:stop])
            start = stop
            if self.fail_next:
                self.fail_next, row.failed = False, "InternalError"
            if row.failed:
                row.num_computed += count  # nothing is written: whoever hits these blocks finds nothing
                row.tokens.extend([-7] * (row.num_computed + 1 - len(row.tokens)))
                answer.errors.append(RowError(batch_idx, row.failed, "made to fail"))
                said = []
            else:
                said = self._compute(row, count, drafts, kept.get(row_idx, {}))
            if answer.counts is None:
                answer.token_ids.append(said[0] if said else -1)
            else:
                answer.token_ids.extend(said)
                answer.counts.append(len(said))
        return unpack(Kind.OUTPUT, pack(answer))

    def _add(self, new: NewRequest) -> None:
        assert new.req_idx not in self.rows, "a row given anew before its removal was told"
        assert new.num_computed_tokens < len(new.token_ids)
        tables = tables_of(new, self.groups)
        for group, table in zip(self.groups, tables):
            full, rest = divmod(new.num_computed_tokens, group.block_size)
            assert rest == 0 or group.kind == "state" or self.num_blocks < 1 << 30
            for index, block in table.items():
                if index >= full:
                    self.kv[block] = {}
        tokens = list(new.token_ids)
        is_long = self.border is not None and len(tokens) > self.border
        media = dict(new.extras.get("media", ()))  # each is two bytes
        self.rows[new.req_idx] = Row(tokens, new.num_computed_tokens, tables, new.seed, is_long, media)

    def _compute(self, row: Row, count: int, drafts: list[int], kept: dict[int, list[tuple[int, int]]]) -> list[int]:
        """The tokens that it gets: up to the first that is not its draft."""
        assert all(0 < num_tokens < count - len(drafts) for num_tokens in kept)
        known = row.num_computed + count - len(drafts)
        assert count > len(drafts) and known <= len(row.tokens), "more tokens scheduled than known"
        assert not drafts or known == len(row.tokens), "drafts, but not all known tokens are computed"
        is_within = self.border is None or row.is_long or known + len(drafts) <= self.border
        assert is_within, "a token beyond the rope border after others that were computed for before it"
        for group, table in zip(self.groups, row.tables, strict=True):
            room = (max(table) + 1) * group.block_size
            assert known + len(drafts) + row.num_unsettled <= room, "no room for what both sides count"
        chain, said = int(row.is_long), []
        for position in range(known + len(drafts)):
            if position >= known:
                if said[-1] != drafts[position - known]:
                    break  # what follows is rejected, and its slots will be written again
                row.tokens.append(said[-1])
            chain = extend(chain, row.tokens[position] + VOCAB * row.media.get(position, 0), position)
            for i, group in enumerate(self.groups):
                index, offset = divmod(position, group.block_size)
                if position >= row.num_computed:
                    slots = self.kv[row.tables[i][index]]
                    assert offset not in slots, "a token computed twice in one generation of its block"
                    slots[offset] = i, chain
                elif not group.window or position > row.num_computed - group.window:
                    slots = self.kv[row.tables[i][index]]
                    assert slots.get(offset) == (i, chain), "attended to a slot that holds something else"
            for i, page in kept.get(position + 1 - row.num_computed, ()):
                self.kv[page] = dict(self.kv[row.tables[i][0]])
            if position + 1 == len(row.tokens):
                said.append(sample(chain, row.seed, position + 1))
        self.num_computed += count
        row.num_computed = known + max(0, len(said) - 1)
        if said:
            row.tokens.append(said[-1])
            row.num_unsettled += 1 + len(drafts) - len(said)
            self.num_accepted += len(said) - 1
        return said


class Driver:
    """The host's side: keeps up to ``depth`` steps in flight and knows what each request must get."""

    def __init__(self, *, depth: int = 2, num_places: int = 0, num_tier_places: int = 0, **limits: Any) -> None:
        if num_places:
            limits["preempted"] = SwappedRequests(num_places, limits["kv_groups"])
        self.tiers = KVTiers(num_tier_places, least_tokens=1) if num_tier_places else None
        self.tier_kv: dict[int, dict[int, tuple[int, int]]] = {}  # what is in each place; it outlives a worker
        self.jobs: list[PageJob] = []  # jobs that were given to the worker
        if "block_size" in limits:
            limits["kv_groups"] = [KVCacheGroup("full", limits.pop("block_size"))]
        limits.setdefault("max_model_len", 10_000)
        limits["new_idle"] = partial(KeptBlocks, fraction=limits.pop("kept_fraction", 0.5), hits=KeptHits())
        self.scheduler = Scheduler(max_in_flight_steps=depth, elsewhere=self.tiers, **limits)
        self.scheduler.rows.lookahead = Drafts(self.scheduler.rows)
        self.depth = depth
        self.budget = limits["max_num_batched_tokens"]
        self.groups: Sequence[KVCacheGroup] = limits["kv_groups"]
        self.border: int | None = limits.get("rope_border")
        self.num_blocks = limits["num_blocks"] if num_places else 1 << 30
        self.worker = Worker(self.groups, self.border, num_blocks=self.num_blocks)
        self.in_flight: deque[tuple[SchedulerOutput, dict[int, set[int]], dict[int, tuple[int, list[Table]]]]] = deque()
        self.tables: dict[int, tuple[int, list[Table]]] = {}  # row -> computed tokens, blocks; as of the newest step
        self.requests: list[tuple[Request, list[int]]] = []
        self.stop_after: dict[Request, int] = {}  # a stop string, found by the host after so many tokens
        self.num_steps = 0
        self.num_drafted = 0
        self.num_paused = 0
        self.leased: set[int] = set()  # ids of the steps that may be taken back
        self.num_revoked = 0
        self.num_awaited = 0  # most requests that waited for a prefix at once

    @property
    def unfinished(self) -> list[Request]:
        return [request for request, _ in self.requests if request.finish_reason is None]

    def add(self, prompt: list[int], *, max_tokens: int, seed: int = 0, n: int = 1, stop_after: int = 0, **more: Any):
        made = []
        media: dict[int, int] = more.pop("media", {})
        placed = tuple((position, bytes([image])) for position, image in sorted(media.items()))
        more["cache_key"] = more.get("cache_key", CacheKey())._replace(placed=placed)
        more["extras"] = {"media": [bytes(pair) for pair in media.items()]}
        params = SamplingParams(n=n, max_tokens=max_tokens, min_tokens=more.pop("min_tokens", 0))
        for index in range(n):
            request = Request(
                f"req-{len(self.requests) - index}",
                prompt,
                params,
                seed=seed + index,
                max_num_tokens=len(prompt) + max_tokens,
                stop_token_ids=frozenset({STOP_ID}),
                index=index,
                **more,
            )
            output = expected_output(
                prompt, seed + index, len(prompt) + max_tokens, params.min_tokens, self.border, media
            )
            if 0 < stop_after < len(output):
                self.stop_after[request] = stop_after
                output = output[:stop_after]
            self.requests.append((request, output))
            self.scheduler.add_request(request)
            made.append(request)
        return made

    def keep(self, request: Request, name: str, until: float) -> None:
        """Keep for a session what a next request with these tokens would find."""
        session = request.cache_key.salt, name, ""
        self.kept.keep(session, blocks_to_keep(self.scheduler, [request]), until)

    @property
    def kept(self) -> KeptBlocks:
        idle = self.scheduler.rows.kv.pool.idle
        assert isinstance(idle, KeptBlocks)
        return idle

    def propose(self, request: Request, count: int, num_right: int) -> None:
        """Drafts of which the first ones are right, if those in flight were all accepted."""
        self.revoke(0)  # whoever has drafts is in no leased step
        begin = request.num_output_tokens + request.num_pending
        drafts = dict(self.requests)[request][begin : begin + count]
        drafts += [VOCAB // 2] * (count - len(drafts))
        drafts[num_right:] = [(token_id + 1) % VOCAB for token_id in drafts[num_right:]]
        self.scheduler.rows.lookahead.propose(request, drafts)

    def pause(self, request: Request) -> None:
        self.revoke(0)
        self.scheduler.pause(request)
        self.num_paused += request.is_paused

    def resume_all(self) -> None:
        for request in self.unfinished:
            self.scheduler.resume(request)

    def schedule(self, is_leased: bool = False) -> bool:
        scheduler = self.scheduler
        newest = scheduler.newest_step
        follows_leased = newest is not None and newest.step_id in self.leased
        if follows_leased and not scheduler.is_steady:
            self.revoke(0)  # as the engine does, or fewer steps would come after a leased one than it may undo
        is_leased = bool(self.in_flight) and scheduler.is_steady and (is_leased or follows_leased)
        had_row = {r for r in scheduler.rows.running if r.status is not RequestStatus.DRAINING}
        decoding = {r for r in had_row if r.status is RequestStatus.DECODING}
        border = self.border
        crossing = {r for r in had_row if border is not None and not r.is_long and r.num_computed_tokens >= border}
        out = scheduler.schedule(can_be_undone=is_leased)
        if is_leased and out is not None:
            self.leased.add(out.step_id)
        self.num_awaited = max(self.num_awaited, len(scheduler.rows.prefixes.waiting))
        lost = {r for r in had_row if r.req_idx < 0}
        kept = [r for r in scheduler.rows.running if r.status is not RequestStatus.DRAINING]
        if type(scheduler.rows.order) is ServingOrder:
            for victim in lost - crossing:
                assert all(victim.sort_key > other.sort_key for other in kept), "preempted for a less urgent one"
        if out is None:
            return False
        out = unpack(Kind.STEP, pack(out))
        self.num_steps += 1
        assert sum(out.num_scheduled_tokens) <= self.budget
        batch = set(out.req_idx)
        assert not any(r.is_paused for r in scheduler.newest_step.batch), "paused, and in a step"
        for request in decoding - lost:
            if request.batch_index != scheduler.rows.batches.current.index:
                assert request.req_idx not in batch
                continue
            assert request.req_idx in batch or request.status in (RequestStatus.DRAINING, RequestStatus.CATCHING_UP)
        self._check_reuse(out)
        return True

    def _check_reuse(self, out: SchedulerOutput) -> None:
        """No block that is given out may still be in the table of another row of a step in flight."""
        left = {row: self.tables.pop(row) for row in out.removed}
        given = [(row, block) for row, _, block in growth_of(out)]
        for new in out.new_requests:
            tables = tables_of(new, self.groups)
            self.tables[new.req_idx] = new.num_computed_tokens, tables
            for group, table in zip(self.groups, tables):
                full = new.num_computed_tokens // group.block_size
                given += [(new.req_idx, block) for index, block in table.items() if index >= full]
        for row, i, block in growth_of(out):
            append(self.tables[row][1][i], block)
        given += [(-1, block) for block in out.page_copies[1::2] if block < self.num_blocks]
        given += [(-1, block) for block in out.kept_states[3::4]]
        for _, used, _ in self.in_flight:
            for _, block in given:
                assert all(block not in blocks for blocks in used.values()), "reused under a step in flight"
        # What is copied into the host's memory may be given out at once: the device makes the copy first.
        copies = zip(out.page_copies[::2], out.page_copies[1::2])
        copied = {page for pair in copies if pair[1] < self.num_blocks for page in pair}
        used = {row: self._read_by(row) for row in out.req_idx} | {-1: copied | set(out.kept_states[3::4])}
        self.in_flight.append((out, used, left))
        for row, count in zip(out.req_idx, out.num_scheduled_tokens):
            computed, tables = self.tables[row]
            self.tables[row] = computed + count, tables

    def _read_by(self, row: int) -> set[int]:
        """The blocks that the row's next query, or a later one, reads or writes."""
        computed, tables = self.tables[row]
        return {
            block
            for group, table in zip(self.groups, tables)
            for index, block in table.items()
            if index >= first_needed(group, computed)
        }

    def revoke(self, num_begun: int) -> None:
        """Of the leased steps in flight the worker has begun so many and drops the others."""
        num_dropped = max(0, sum(step.step_id in self.leased for step in self.scheduler.rows.steps) - num_begun)
        self.leased.clear()
        for _ in range(num_dropped):
            out, _, left = self.in_flight.pop()
            for row, group, block in reversed(growth_of(out)):
                assert self.tables[row][1][group].popitem() == (max(self.tables[row][1][group], default=-1) + 1, block)
            for row in out.req_idx:
                computed, tables = self.tables[row]
                self.tables[row] = computed - 1, tables
            self.tables |= left  # the worker has these rows still
        self.num_revoked += num_dropped
        undo_steps(self.scheduler.rows, num_dropped)
        check_scheduler(self.scheduler)

    def answer(self) -> None:
        out, *_ = self.in_flight.popleft()
        answer = self.worker.execute(out)
        sampled, failed, _, num_rows, _ = self.scheduler.update(answer)
        counts: dict[Request, int] = {}
        for request, token_id, place in sampled:
            assert answer.token_ids[place] == token_id
            counts[request] = counts.get(request, 0) + 1
        assert num_rows == len(counts)
        if out.drafts is not None:
            self.num_drafted += len(out.drafts.token_ids)
        for request, count in counts.items():
            assert [t for r, t, _ in sampled if r is request] == request.token_ids[-count:]
            stop = self.stop_after.get(request)
            length = len(request.output_token_ids)
            if stop is not None and length - count < stop <= length:
                del request.token_ids[request.num_prompt_tokens + stop :]  # the others are not delivered
                self.scheduler.finish(request, FinishReason.STOP)
                request.finish_reason = FinishReason.STOP  # as its caller is told, if it ended in the same answer
        for request, error in failed:
            assert request.finish_reason is FinishReason.ERROR and error.message == "made to fail"
        self.verify()

    def take_jobs(self) -> None:
        """Give the worker the copies that are due: what is on its way is in no page yet."""
        if self.tiers is None:
            return
        for job in self.tiers.take_fetches():
            for _, used, _ in self.in_flight:
                assert all(blocks.isdisjoint(job.pages) for blocks in used.values()), "copied to under a step in flight"
            self.worker.kv |= {page: {} for page in job.pages}
            self.jobs.append(job)
        if (job := self.tiers.take_saves()) is not None:
            self.jobs.append(job)

    def end_job(self, place: int = 0, *, loses: bool = False) -> None:
        """The worker has made the copies of a job, but for the first if it ``loses`` that."""
        job = self.jobs.pop(place)
        assert self.tiers is not None
        if job.is_fetch:
            self.worker.kv |= {page: dict(self.tier_kv[at]) for page, at in zip(job.pages, job.places, strict=True)}
        else:
            self.tier_kv |= {at: dict(self.worker.kv[page]) for page, at in zip(job.pages, job.places, strict=True)}
        if loses:
            (self.worker.kv if job.is_fetch else self.tier_kv)[job.pages[0] if job.is_fetch else job.places[0]] = {}
        self.tiers.end(job, {0} if loses else ())
        self.verify()

    def restart(self) -> None:
        self.scheduler.preempt_all()
        self.jobs.clear()
        self.worker = Worker(self.groups, self.border, num_blocks=self.num_blocks)
        self.in_flight.clear()
        self.tables.clear()
        self.verify()

    def verify(self) -> None:
        check_scheduler(self.scheduler)
        for request, output in self.requests:
            got = request.output_token_ids
            if request.finish_reason in (FinishReason.STOP, FinishReason.LENGTH):
                assert got == output, f"{request} got {got} rather than {output}"
                stopped = request in self.stop_after or output[-1] == STOP_ID
                # A stop id within min_tokens does not stop; ending on one at full length still says LENGTH or STOP.
                if request.finish_reason is FinishReason.LENGTH:
                    assert len(request.token_ids) == request.max_num_tokens
                else:
                    assert stopped
            else:
                assert got == output[: len(got)]

    def drain(self, rng: random.Random | None = None) -> None:
        """Run to the end. Fails when no progress is possible, or it takes more steps than anything reasonable."""
        bound = 1000 + 60 * sum(request.max_num_tokens for request in self.unfinished)
        while True:
            bound -= 1
            assert bound > 0, "requests go round in circles"
            self.resume_all()
            if len(self.in_flight) < self.depth and (rng is None or rng.random() < 0.7 or not self.in_flight):
                if self.schedule():
                    continue
            self.take_jobs()
            if self.jobs:
                self.end_job()
            elif self.in_flight:
                self.answer()
            elif self.unfinished:
                is_scheduled = self.schedule()
                self.take_jobs()  # it may have sent for pages, and nothing else has room beside them
                assert is_scheduled or self.jobs, f"stuck with {self.unfinished}"
            else:
                break
        self.verify()
        self.expect_idle()

    def expect_idle(self) -> None:
        scheduler = self.scheduler
        while self.tiers is not None and (self.jobs or self.take_jobs() or self.jobs):
            self.end_job()
        assert scheduler.num_running == scheduler.num_waiting == 0
        check_scheduler(scheduler)
        assert scheduler.num_free_blocks == scheduler.num_blocks
        assert scheduler.rows.preempted.num_kept == 0, "a place in the host's memory was lost"
        # Nothing else shows that a request is still known there, but memory in the long run.
        assert not scheduler.parallel_sampling._first and len(scheduler.rows.free_rows) == scheduler.num_rows
        assert all(request.finish_reason is not None for request, _ in self.requests)
