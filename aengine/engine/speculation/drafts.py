"""Drafts: guesses at the tokens that a request gets next, which its next step computes too, and samples after each.

A guess costs its computation and changes no token: those are kept that agree with what was sampled.

    answer of step N ──> Speculation, a grammar ──> propose ──> extend, tell: step N + 2 ──> settle: what was counted
                         step N + 1 is in flight: a draft follows the tokens that it samples  for rejected ones goes

`Proposing` is the `Speculation` that asks proposers; what is drafted of their guesses a `DraftBudget` says.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence

from ...config import LEAST_LOGITS
from ...ipc.messages import DraftColumns, SchedulerOutput, int32
from ...telemetry.metrics import DraftStatistics
from ..delivery import Sampled
from ..scheduler.request import Request, RequestStatus
from ..scheduler.rows import Rows
from ..scheduler.step import NOTHING_AHEAD, AheadTokens, InFlightStep, Lookahead


class Speculation:
    """Drafts nothing. What does has the same verbs, which the step loop calls."""

    def note_answer(self, step: InFlightStep, answered_at: float, sampled: Sampled) -> None:
        """Called with the tokens of each answer, and when the worker sent it, in monotonic seconds."""

    def propose(self) -> bool:
        """Called before a step is made: propose drafts for it to the scheduler. What a grammar forces was proposed
        before, and stays. False: no step can be made now, as some in flight are being taken back for drafts."""
        return True


class Drafts(Lookahead):
    """Drafts of the requests that have these rows. Whatever they are, a request gets the tokens of a run without."""

    def __init__(self, rows: Rows) -> None:
        self._rows = rows
        self._proposed: dict[Request, AheadTokens] = {}
        # for each proposer, how often so many tokens were drafted and so many of them accepted
        self._counts: defaultdict[str, Counter[tuple[int, int]]] = defaultdict(Counter)

    def statistics(self) -> tuple[DraftStatistics, ...]:
        """Return what was verified of the drafts of each proposer."""
        return tuple(_statistics_of(name, counts) for name, counts in list(self._counts.items()))

    def propose(
        self, request: Request, token_ids: Sequence[int], *, are_certain: bool = False, proposer: str = "grammar"
    ) -> int:
        """See `Lookahead`. They are not taken as certain while drafts in flight may be rejected, since then these may
        belong elsewhere, nor with penalties, which count what was sampled. Of a model with states those that may be
        rejected are as many as can be taken again out of these. Nothing happens unless the request decodes."""
        rows, params = self._rows, request.params
        if request.status is not RequestStatus.DECODING:
            return 0
        stops, stop = request.stop_token_ids, len(token_ids)
        if not stops.isdisjoint(token_ids):
            stop = next(i for i, token_id in enumerate(token_ids) if token_id in stops)
        room = rows.rope.limit(request) - 1 - request.num_computed_tokens  # its last token must be sampled
        drafts = list(token_ids[: max(0, min(stop, room))])
        counts_sampled = params.presence_penalty or params.frequency_penalty or params.repetition_penalty != 1
        are_certain = are_certain and not counts_sampled and not self.may_reject(request)
        if not are_certain:
            del drafts[rows.kv.most_ahead :]
        if drafts:
            self._proposed[request] = AheadTokens(drafts, are_certain, proposer)
            rows.stop_decoding(request)
        return len(drafts)

    def may_reject(self, request: Request) -> bool:
        in_flight = [(step.batch[i], drafts) for step in self._rows.steps for i, drafts in step.ahead.items()]
        return any(one is request and not drafts.are_certain for one, drafts in in_flight)

    def extend(self, request: Request, end: int, most: int, num_logits: int) -> AheadTokens:
        """See `Lookahead`. They preempt no request, and all others can still grow by one block."""
        drafts = self._proposed.pop(request, NOTHING_AHEAD)
        if not drafts.token_ids:
            return drafts
        rows, kv = self._rows, self._rows.kv
        wanted = min(len(drafts.token_ids), most, max(rows.num_rows, LEAST_LOGITS) - num_logits)
        spare = max(0, rows.num_spare_blocks)
        if kv.num_lacking(request, end + wanted) > spare:
            wanted = min(wanted, kv.reach(request, spare, end + wanted) - end)
        return drafts._replace(token_ids=drafts.token_ids[: max(0, wanted)])

    def tell(self, output: SchedulerOutput, ahead: dict[int, AheadTokens]) -> None:
        if not ahead:
            return
        counts, is_certain, is_found = (int32(bytes(4 * len(output.req_idx))) for _ in range(3))
        token_ids = int32()
        for batch_idx, (drafts, are_certain, _) in ahead.items():
            counts[batch_idx] = len(drafts)
            is_certain[batch_idx] = are_certain
            is_found[batch_idx] = drafts[0] < 0
            token_ids.extend(drafts if drafts[0] >= 0 else ())
        output.drafts = DraftColumns(counts, token_ids, is_certain, is_found)

    def settle(self, request: Request, ahead: AheadTokens, count: int) -> None:
        num_drafted, num_accepted = len(ahead.token_ids), max(0, count - 1)
        self._counts[ahead.proposer][num_drafted, num_accepted] += 1
        if request.history is not None:
            request.history.note_verified(request, num_drafted, num_accepted)
        if not ahead.are_certain and request.req_idx >= 0:
            self._rows.settle(request, 1 + num_drafted - count)

    def drop(self, request: Request) -> None:
        self._proposed.pop(request, None)


def _statistics_of(proposer: str, counts: Counter[tuple[int, int]]) -> DraftStatistics:
    pairs = list(counts.items())  # they may grow meanwhile: another thread may ask
    num_drafted = sum(drafted * times for (drafted, _), times in pairs)
    longest = max((accepted for (_, accepted), _ in pairs), default=0)
    by_position = tuple(sum(times for (_, accepted), times in pairs if accepted > i) for i in range(longest))
    return DraftStatistics(proposer, sum(times for _, times in pairs), num_drafted, sum(by_position), by_position)
