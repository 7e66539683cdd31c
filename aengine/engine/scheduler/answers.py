"""Applying the worker's answers: ids are committed, ends found, and what was counted beyond them taken back."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

from ...ipc.messages import KV_LOST, NO_RESULTS, ModelRunnerOutput, ResultColumns, RowError
from ...outputs import FinishReason
from .crash_quarantine import CrashQuarantine
from .request import Request
from .rows import Rows
from .step import InFlightStep


class StepResult(NamedTuple):
    """The result of applying an answer."""

    sampled: list[tuple[Request, int, int]]  # (request, token id, place of the token in the answer's ``token_ids``)
    failed: list[tuple[Request, RowError]]  # requests that failed by themselves, with their errors
    results: list[tuple[Request, array[float]]]  # (request, a piece of its result; the last one, if it has ended)
    num_rows: int  # number of requests that got tokens
    begun: list[Request]  # requests that got their first token


class Answers:
    """Applies answers to the requests of their steps. ``finish`` ends a request; ``on_prompt`` is called when a prompt
    is computed for which other requests wait."""

    def __init__(
        self,
        rows: Rows,
        quarantine: CrashQuarantine,
        finish: Callable[[Request, FinishReason], None],
        on_prompt: Callable[[Request], None],
    ) -> None:
        self._rows = rows
        self._quarantine = quarantine
        self._finish = finish
        self._on_prompt = on_prompt
        self._begun: list[Request] = []  # requests that got their first token from the answer being applied

    def apply(self, step: InFlightStep, output: ModelRunnerOutput, token_ids: list[int]) -> StepResult:
        """Commit the answer to ``step``, which was checked and is in flight no more; ``token_ids`` are its ids."""
        begun: list[Request] = []
        self._begun = begun
        failed: list[tuple[Request, RowError]] = []
        for error in output.errors:
            request = step.batch[error.batch_idx]
            if error.type == KV_LOST:  # it is computed anew, and what steps in flight bring is no token
                step.chunks.pop(error.batch_idx, None)  # nothing was written that others could find
                self._rows.preempted.drop(request)
                if request.req_idx >= 0:
                    self._rows.restart(request)
            elif request.finish_reason is None:
                self._finish(request, FinishReason.ERROR)
                failed.append((request, error))
        # Before the tokens, of which one may end a request that gets its last piece as well.
        results = [] if output.results is None else self._commit_results(step, output.results)
        if output.counts is None:
            sampled = self._commit(step, token_ids)
            num_rows = len(sampled)
        else:
            sampled, num_rows = self._commit_ragged(step, token_ids, output.counts)
        for request in step.leavers:
            self._rows.release(request)
        self._begun = []
        return StepResult(sampled, failed, results, num_rows, begun)

    def _commit(self, step: InFlightStep, column: list[int]) -> list[tuple[Request, int, int]]:
        """Append to each request its token of ``column`` (-1: none). Returns (request, token id, place in ``column``)
        of each appended token."""
        sampled: list[tuple[Request, int, int]] = []
        batch_idx = -1
        for request, token_id in zip(step.batch, column, strict=True):
            batch_idx += 1
            if request.finish_reason is not None:  # the request has ended: this token was sampled past its end
                continue
            if token_id < 0:
                if batch_idx in step.chunks:  # not so of a request that has lost its blocks above
                    self._note_chunk(request, step.chunks[batch_idx])
                continue
            token_ids = request.token_ids
            token_ids.append(token_id)
            sampled.append((request, token_id, batch_idx))
            if len(token_ids) == request.next_check_len or token_id in request.stop_token_ids:
                self._check_length(request, token_id)
        return sampled

    def _commit_ragged(
        self, step: InFlightStep, column: list[int], counts: Sequence[int]
    ) -> tuple[list[tuple[Request, int, int]], int]:
        """Append ``counts[i]`` tokens of ``column`` to request i. Returns the appended tokens as `_commit` does, and
        how many requests got some."""
        sampled: list[tuple[Request, int, int]] = []
        num_rows = end = 0
        for batch_idx, (request, count) in enumerate(zip(step.batch, counts, strict=True)):
            begin, end = end, end + count
            if request.finish_reason is not None:
                continue
            if batch_idx in step.chunks:
                self._note_chunk(request, step.chunks[batch_idx])
            num_rows += count > 0
            new, token_ids = column[begin:end], request.token_ids
            if len(token_ids) + count < request.next_check_len and request.stop_token_ids.isdisjoint(new):
                token_ids += new
                sampled += zip(repeat(request), new, range(begin, end), strict=False)
            else:
                places = range(begin, end)
                sampled += [(request, column[place], place) for place in places if self._append(request, column[place])]
            if batch_idx in step.ahead:
                self._rows.lookahead.settle(request, step.ahead[batch_idx], count)
        return sampled, num_rows

    def _note_chunk(self, request: Request, num_tokens: int) -> None:
        """Note that the KV of the request's first ``num_tokens`` tokens is written: a chunk of its prompt was
        answered."""
        self._rows.kv.note_written(request, num_tokens)
        self._rows.prefixes.advance(request)

    def _append(self, request: Request, token_id: int) -> bool:
        """Append a token. False: the request has ended already, and this token was sampled past its end."""
        if request.finish_reason is not None:
            return False
        request.token_ids.append(token_id)
        if len(request.token_ids) == request.next_check_len or token_id in request.stop_token_ids:
            self._check_length(request, token_id)
        return True

    def _commit_results(self, step: InFlightStep, columns: ResultColumns) -> list[tuple[Request, array[float]]]:
        """Note of the pieces that have come that they need not come again, and end the requests that wait for nothing
        else. Returns (request, piece) of each."""
        results = []
        for batch_idx, result in columns.items():
            request = step.batch[batch_idx]
            if request.finish_reason is not None:
                continue
            results.append((request, result))
            request.results_from = max(request.results_from, step.chunks.get(batch_idx, NO_RESULTS))
            if not request.samples and batch_idx not in step.chunks:
                self._rows.kv.note_written(request, len(request.token_ids))
                self._finish(request, FinishReason.LENGTH if request.params.max_tokens == 0 else FinishReason.STOP)
        return results

    def _check_length(self, request: Request, token_id: int) -> None:
        """Handle a stop token, the last token, the first one after (re)starting, or one past a full block."""
        num_tokens = len(request.token_ids)
        if num_tokens == request.next_check_len:
            # Its last token was sampled just now, so the KV of all before it is written, however many steps overlap.
            self._rows.kv.note_written(request, num_tokens - 1)
            block_size = self._rows.kv.block_size
            next_full = ((num_tokens - 1) // block_size + 1) * block_size
            if request.states.copies:  # the answer to the step that begins with a copy brings the token after next
                next_full = min(next_full, request.states.copies[0].border + 1)
            if self._quarantine and self._quarantine.holds(request):
                next_full = num_tokens
            request.next_check_len = min(next_full + 1, request.max_num_tokens)
            if request.is_leading:
                self._rows.prefixes.leave(request)
            if request.dependents:
                self._on_prompt(request)
        num_output = num_tokens - request.num_prompt_tokens
        if num_output == 1:
            self._begun.append(request)
        if token_id in request.stop_token_ids and num_output > request.params.min_tokens:
            self._finish(request, FinishReason.STOP)
        elif num_tokens == request.max_num_tokens:
            self._finish(request, FinishReason.LENGTH)
