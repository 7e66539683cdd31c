"""Messages of the rings: plain data, columns rather than rows.

A decode step of 256 requests is five int32 columns, packed as raw bytes (0.7 us), not 256 objects (126 us). Columns
are ``array('i')`` on both sides: they have the buffer protocol, so the runner wraps them with ``torch.frombuffer``,
and the host needs no numpy. Everything received is data, never code: sizes and ranges are checked by `unpack`,
and nothing is ever unpickled.

The direction and content of each kind:

    host -> worker   LOAD             dict: config, model source, rank, and "lead", if there are several; answered by
                                      PROGRESS..., then PROFILED or ERROR
                     ALLOCATE         dict: PLAN_LIMITS, agreed for all ranks; answered by PROGRESS..., READY or ERROR
                     STEP             SchedulerOutput; answered by OUTPUT (at once if sample_now, else after GRAMMAR)
                     GRAMMAR          GrammarOutput: the bitmask of step step_id
                     CALL             [method, is_own, *arguments]: a collective call, to which every rank replies: of
                                      one of our own methods, or one of the worker extension
                     JOIN             [sizes, has_prompts]: a round in which this replica has no step, see
                                      SchedulerOutput's round_sizes and round_has_prompts; not answered
                     REVOKE           nothing; leased steps that were not begun are dropped; answered by REVOKED. To
                                      other ranks than the first: [first, last], ids of those that it dropped
                     SHUTDOWN         nothing; the worker ends
    worker -> host   PROGRESS         dict: stage, done, total, unit, detail
                     PROFILED         dict: PLAN_LIMITS, the most that this rank can keep; block_size, vocab_size,
                                      kv_groups, and whatever else must be equal on all ranks
                     READY            dict: what this rank has of its own: pid, seconds, device, num_graphs, ...
                     OUTPUT           ModelRunnerOutput
                     REPLY            dict: value (any plain data), or error (a dict like ERROR's)
                     REVOKED          how many steps were dropped, the newest ones
                     ERROR            dict: type, message, traceback; step_id of the frame that failed
                     LOG              dict: a record of the worker's logging, see LOG_TEXTS; at any time
"""

from __future__ import annotations

import math
import struct
from array import array
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from functools import partial
from operator import attrgetter
from typing import Any

import msgpack

KV_LOST = "KVLost"
"""Type of the `RowError` of a request whose pages did not come back from the host's memory."""
UNSAMPLED = "no token is left to sample", "the model's logits hold NaN or infinity for this request"
"""What the messages of `RowError` begin with of which the request's own logits processors may be the cause."""
LOG_TEXTS = ("name", "text", "path", "function", "thread")
"""The texts of a LOG message, beside its ``level`` and ``line``, integers, and ``created``, seconds since 1970."""
PLAN_LIMITS = ("num_blocks", "max_model_len", "max_num_batched_tokens")
"""What the ranks agree on: of each the least that one of them offers, at least 1."""
_OFFER_COUNTS = (*PLAN_LIMITS, "block_size", "vocab_size")


class MessageError(ValueError):
    """A message that does not have the form it must have."""


class Kind(IntEnum):
    LOAD = 1
    STEP = 2
    GRAMMAR = 3
    CALL = 4
    SHUTDOWN = 5
    REVOKE = 6
    ALLOCATE = 7
    JOIN = 8
    PROGRESS = 16
    READY = 17
    OUTPUT = 18
    REPLY = 19
    ERROR = 20
    LOG = 21
    REVOKED = 22
    PROFILED = 23


def int32(values: Any = ()) -> array[int]:
    """Return the values as an int32 column."""
    return array("i", values)


def float32(values: Any = ()) -> array[float]:
    """Return the values as a float32 column."""
    return array("f", values)


STATE_BLOCK_SIZE = 1 << 30
"""Tokens in a block that is a state: any sequence has one."""


@dataclass(frozen=True, slots=True)
class KVCacheGroup:
    """Layers that keep the same of a sequence, and share a block table (runner/kv_spec.py)."""

    kind: str  # "full": keys and values of all tokens; "window": of the last ones; "state": a state of fixed size
    block_size: int  # tokens in a block
    window: int = 0  # tokens that a query attends to, its own included; 0: all
    num_ahead: int = 0  # guessed tokens of a step that a state can be rid of, at most

    @staticmethod
    def from_ready(ready: dict[str, Any]) -> tuple[KVCacheGroup, ...]:
        """Return the groups of ``ready``, what the ranks have agreed on; without any it is one of full attention."""
        groups = ready.get("kv_groups") or [("full", ready["block_size"], 0)]
        return tuple(KVCacheGroup(*group) for group in groups)

    def most_blocks(self, num_tokens: int, step_tokens: int) -> int:
        """Return the most blocks of a sequence of ``num_tokens``, of which a step computes at most ``step_tokens``."""
        needed = -(-num_tokens // self.block_size)
        if not self.window:
            return needed
        return min(needed, -(-(self.window - 1 + step_tokens) // self.block_size) + 1)


def most_ahead(groups: Sequence[KVCacheGroup], otherwise: int) -> int:
    """Return how many tokens of a request a step may guess; ``otherwise`` where no group keeps states, which must be
    rid of those that were wrong."""
    return min((group.num_ahead for group in groups if group.kind == "state"), default=otherwise)


def kv_capacity(groups: Sequence[KVCacheGroup], num_blocks: int, most: int, step_tokens: int) -> int:
    """Return the most tokens, up to ``most``, of which a request can be computed when it has ``num_blocks`` pages to
    itself and is computed by at most ``step_tokens`` in a step."""

    def needed(num_tokens: int) -> int:
        return sum(group.most_blocks(num_tokens, step_tokens) for group in groups)

    return bisect_right(range(1, most + 1), num_blocks, key=needed)


NO_RESULTS = 2**31 - 1
"""`NewRequest.results_from` of a request that gets tokens alone."""

Extras = dict[str, list[bytes]]
"""What a request asks for that is a feature's own: its columns, by the feature's name. Faults are that request's."""
ARGUMENTS_OF = "arguments of "
"""What an extra's name begins with that has the JSON of a logits processor's arguments; its own name follows."""


@dataclass(slots=True)
class NewRequest:
    """A request's first appearance on a worker (also after a preemption: then ``token_ids`` holds what it generated).

    Sampling values are in `SamplingParams`' units; ``seed`` is always a number here.
    """

    req_idx: int  # row of the request on the device, for as long as it runs
    token_ids: array[int]  # int32 [num_tokens]: prompt, then what was generated before a preemption
    num_prompt_tokens: int  # how many of ``token_ids`` are the prompt
    num_computed_tokens: int  # tokens whose KV is there already (prefix cache); less than len(token_ids)
    block_ids: array[int]  # int32: blocks of the computed tokens and of this step's, one KV group after the other
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logprobs: int = -1  # alternatives reported for each token beside the sampled one; -1: no log-probabilities
    min_tokens: int = 0
    max_num_tokens: int = 2**31 - 1  # most tokens of prompt and completion together
    results_from: int = NO_RESULTS  # first token that a result is made of: those before have had theirs, or need none
    stop_token_ids: array[int] = field(default_factory=int32)  # ids that end the completion; banned before min_tokens
    block_spans: array[int] = field(default_factory=int32)
    """int32 [2 * num_groups], a pair for each KV group: how many leading blocks of its table are left out, as they are
    before the window, and how many of ``block_ids`` follow. Empty: one group, and all its blocks."""
    extras: Extras = field(default_factory=dict)


@dataclass(slots=True)
class DraftColumns:
    """Guesses at the tokens that come next. A row's drafts follow all its other tokens, those in flight included, and
    are computed with them; the row samples after its last known token and after each draft. If they are certain, it
    gets all of them, and samples after the last alone."""

    counts: array[int]  # [num_reqs] drafts of each request, 0 or more; num_scheduled_tokens includes them
    token_ids: array[int]  # drafts that the host knows, one request after the other
    is_certain: array[int]  # [num_reqs] 1: all drafts of the request are accepted
    is_found: array[int] = field(default_factory=int32)  # [num_reqs] 1: the worker finds them in its row; empty: none

    def num_known(self) -> list[int]:
        """Return how many drafts of each request ``token_ids`` has: [num_reqs]."""
        is_found = self.is_found or bytes(len(self.counts))
        return [0 if found else count for count, found in zip(self.counts, is_found, strict=True)]


@dataclass(slots=True)
class SchedulerOutput:
    """One step: which rows compute how many tokens, and what changed in the rows since the step before.

    A worker applies it in the order of the fields. A row whose known tokens are all computed by this step samples one
    more: both sides know that without asking, as ``num_computed + num_scheduled == num_tokens``.

    A row with k drafts gets 1 to 1 + k tokens: both sides count 1 + k, until a later step settles how many it was. Of
    drafts that are certain there is nothing to settle.
    """

    step_id: int
    settled_rows: array[int] = field(default_factory=int32)  # [k] rows whose step with drafts was answered
    num_rejected: array[int] = field(default_factory=int32)  # [k] how many drafts of these rows were rejected
    removed: array[int] = field(default_factory=int32)  # rows freed: their requests ended or were preempted
    new_requests: list[NewRequest] = field(default_factory=list)
    block_rows: array[int] = field(default_factory=int32)  # [k] row of each new block
    block_ids: array[int] = field(default_factory=int32)  # [k] id of each new block, appended to the row's table
    block_groups: array[int] = field(default_factory=int32)  # [k] KV group of each new block; empty: the first one
    req_idx: array[int] = field(default_factory=int32)  # [num_reqs] the batch: row of each request
    num_scheduled_tokens: array[int] = field(default_factory=int32)  # [num_reqs] tokens each computes, 1 or more
    sample_now: bool = True  # False: a GRAMMAR frame follows, and sampling waits for it
    is_leased: bool = False  # the step may be revoked until the worker begins it
    drafts: DraftColumns | None = None  # None: no request has drafts
    page_copies: array[int] = field(default_factory=int32)
    """[2 * k] pairs of pages, from and to: before anything is computed, the second becomes as the first. Numbers behind
    the pool's are pages in the host's memory; copies to these come first, before blocks have new owners."""
    kept_states: array[int] = field(default_factory=int32)
    """[4 * k] row, tokens, KV group, page: when the row has computed so many of its tokens of this step, not all, the
    page gets a copy of the group's states. Those of a row by ascending tokens."""
    round_sizes: array[int] = field(default_factory=int32)
    """[num_replicas] tokens of each replica in the round that this step is part of; empty: there are no rounds."""
    round_has_prompts: bool = False  # whether a request of any replica in the round computes several tokens


@dataclass(slots=True)
class GrammarOutput:
    """The bitmask of one step: row i of ``bitmask`` belongs to batch position ``batch_idx[i]``.

    A position with k drafts that are not certain has 1 + k rows, one after the other: of the token that follows its
    known ones, and of those that follow each draft. Others have one, of the token that they sample."""

    step_id: int
    batch_idx: array[int]
    bitmask: bytes | bytearray | memoryview | int
    """int32 [len(batch_idx), ceil(vocab_size / 32)], least significant bit first. A number: so many bytes, which lie in
    the channel's memory for bitmasks."""


@dataclass(slots=True)
class LogprobColumns:
    """Log-probabilities of the tokens for which they were asked. m entries; each has ``counts[i]`` alternatives."""

    token_idx: array[int]  # [m] place of each token in the answer's token_ids
    sampled: array[float]  # [m] log-probability of each token
    counts: array[int]  # [m] alternatives given for each token
    token_ids: array[int]  # [sum(counts)] ids of the alternatives, the likeliest first
    values: array[float]  # [sum(counts)] log-probabilities of the alternatives


@dataclass(slots=True)
class ResultColumns:
    """Results of m requests, beside or in place of tokens. A request that samples gets them in pieces, with the steps
    that compute its prompt; to one that does not, the piece of its last step is the end."""

    batch_idx: array[int]  # [m] position of each request in the batch
    sizes: array[int]  # [m] numbers in each result
    values: array[float]  # [sum(sizes)] the results, one after the other

    def items(self) -> list[tuple[int, array[float]]]:
        """Yield (batch position, result) of each request that gets a result."""
        found, end = [], 0
        for i, size in zip(self.batch_idx, self.sizes, strict=True):
            begin, end = end, end + size
            found.append((i, self.values[begin:end]))
        return found


@dataclass(slots=True)
class RowError:
    """A request that failed by itself in a step; the others of the batch went on."""

    batch_idx: int
    type: str  # name of an error of errors.py; or KV_LOST, then the request is to be computed anew
    message: str


@dataclass(slots=True)
class ModelRunnerOutput:
    """The answer to one step, in the order of its batch."""

    step_id: int
    token_ids: array[int]  # [num_reqs], -1 where nothing was sampled (a chunk of a prompt); with counts [sum(counts)]
    logprobs: LogprobColumns | None = None
    errors: list[RowError] = field(default_factory=list)
    answered_at: float = 0.0  # when the worker sent it, in seconds of CLOCK_MONOTONIC, which both processes share
    seconds: float = 0.0  # seconds that the device took for the step; 0: not measured
    counts: array[int] | None = None  # [num_reqs] tokens of each request in a step with drafts; None: one, or -1
    results: ResultColumns | None = None
    graph_mode: int = field(default=0, compare=False)  # 0: launched op by op; 1: in part as graphs; 2: as graphs
    num_paddings: int = field(default=0, compare=False)  # rows or tokens that its graphs computed beyond its own

    def num_tokens(self) -> Sequence[int]:
        """Return how many tokens each request of the batch got, [num_reqs]."""
        return [int(token_id >= 0) for token_id in self.token_ids] if self.counts is None else self.counts


_packer = msgpack.Packer(autoreset=True, use_bin_type=True)


def pack(message: object) -> bytes:
    """Encode any of the above, or plain data (None, bool, int, float, str, bytes, list, dict)."""
    if type(message) is SchedulerOutput:
        m, d = message, message.drafts
        return _packer.pack(
            (
                m.step_id,
                m.settled_rows.tobytes(),
                m.num_rejected.tobytes(),
                m.removed.tobytes(),
                [_new_request(r) for r in m.new_requests],
                m.block_rows.tobytes(),
                m.block_ids.tobytes(),
                m.block_groups.tobytes(),
                m.req_idx.tobytes(),
                m.num_scheduled_tokens.tobytes(),
                m.sample_now,
                m.is_leased,
                d and [c.tobytes() for c in (d.counts, d.token_ids, d.is_certain, d.is_found)],
                m.page_copies.tobytes(),
                m.kept_states.tobytes(),
                m.round_sizes.tobytes(),
                m.round_has_prompts,
            )
        )
    if type(message) is ModelRunnerOutput:
        o, lp, r = message, message.logprobs, message.results
        logprobs = lp and [c.tobytes() for c in (lp.token_idx, lp.sampled, lp.counts, lp.token_ids, lp.values)]
        errors = [(e.batch_idx, e.type, e.message) for e in o.errors]
        counts = None if o.counts is None else o.counts.tobytes()
        results = r and [c.tobytes() for c in (r.batch_idx, r.sizes, r.values)]
        return _packer.pack(
            (o.step_id, o.token_ids.tobytes(), logprobs, errors, o.answered_at, o.seconds, counts, results)
            + (o.graph_mode, o.num_paddings)
        )
    if type(message) is GrammarOutput:
        return _packer.pack((message.step_id, message.batch_idx.tobytes(), message.bitmask))
    return _packer.pack(message)


def unpack(kind: Kind, payload: bytes | bytearray | memoryview) -> Any:
    """Decode and check. Raises MessageError when the payload is not what ``kind`` must carry."""
    try:
        data = msgpack.unpackb(payload, use_list=True, strict_map_key=False)
        if kind is Kind.STEP:
            return _step(data)
        if kind is Kind.OUTPUT:
            return _output(data)
        if kind is Kind.GRAMMAR:
            step_id, batch_idx, bitmask = data
            return GrammarOutput(_int(step_id), _ints(batch_idx), bitmask if type(bitmask) is int else _bytes(bitmask))
        check = _CHECKS.get(kind)
        if check is not None:
            check(data)
        return data
    except MessageError:
        raise
    except Exception as error:  # the texts of some msgpack errors show all of the payload
        reason = f"{type(error).__name__}: {error!s:.300}"
        raise MessageError(f"a {kind.name} message can't be decoded: {reason}") from None


def _new_request(r: NewRequest) -> tuple[Any, ...]:
    tokens, blocks, stops = r.token_ids.tobytes(), r.block_ids.tobytes(), r.stop_token_ids.tobytes()
    return _NUMBERS.pack(*_NUMBERS_OF(r)), tokens, blocks, stops, r.block_spans.tobytes(), r.extras


def _step(data: Any) -> SchedulerOutput:
    step_id, settled_rows, num_rejected, removed, new, block_rows, block_ids, block_groups, req_idx, *rest = data
    scheduled, sample_now, is_leased, drafts, page_copies, kept_states, round_sizes, round_has_prompts = rest
    out = SchedulerOutput(
        _int(step_id),
        _ints(settled_rows),
        _ints(num_rejected),
        _ints(removed),
        [_request(r) for r in new],
        _ints(block_rows),
        _ints(block_ids),
        _ints(block_groups),
        _ints(req_idx),
        _ints(scheduled),
        bool(sample_now),
        bool(is_leased),
        None if drafts is None else DraftColumns(*map(_ints, drafts)),
        _ints(page_copies),
        _ints(kept_states),
        _ints(round_sizes),
        bool(round_has_prompts),
    )
    batch = out.req_idx, out.num_scheduled_tokens
    pairs = (out.settled_rows, out.num_rejected), (out.block_rows, out.block_ids), batch
    is_odd = len(out.block_groups) not in (0, len(out.block_ids)) or len(out.page_copies) % 2
    is_odd = is_odd or len(out.kept_states) % 4 > 0
    if is_odd or any(len(a) != len(b) for a, b in pairs):
        raise MessageError(f"step {out.step_id}: columns of unequal length")
    if out.drafts is not None:
        drafts, num_reqs = out.drafts, len(out.req_idx)
        fits = len(drafts.counts) == len(drafts.is_certain) == num_reqs and len(drafts.is_found) in (0, num_reqs)
        if not fits or min(drafts.counts, default=0) < 0 or sum(drafts.num_known()) != len(drafts.token_ids):
            raise MessageError(f"step {out.step_id}: drafts that do not fit the batch")
    return out


def _request(data: Any) -> NewRequest:
    packed, tokens, blocks, *columns, extras = data
    row, num_prompt, num_computed, *values = _NUMBERS.unpack(packed)
    r = NewRequest(row, _ints(tokens), num_prompt, num_computed, _ints(blocks), *values, *map(_ints, columns))
    r.extras = extras
    if type(extras) is not dict or len(extras) > _MOST_EXTRAS:
        raise MessageError(f"request of row {r.req_idx}: extras that are no mapping, or more than {_MOST_EXTRAS}")
    for name, of_feature in extras.items():
        if type(name) is not str or type(of_feature) is not list or not all(type(c) is bytes for c in of_feature):
            raise MessageError(f"request of row {r.req_idx}: extras that are not columns by name")
    if not 0 <= r.num_computed_tokens < len(r.token_ids) or not 0 < r.num_prompt_tokens <= len(r.token_ids):
        raise MessageError(f"request of row {r.req_idx}: token counts do not fit together")
    if len(r.block_spans) % 2 or (r.block_spans and sum(r.block_spans[1::2]) != len(r.block_ids)):
        raise MessageError(f"request of row {r.req_idx}: blocks of groups do not fit together")
    return r


def _output(data: Any) -> ModelRunnerOutput:
    step_id, ids, logprobs, errors, answered_at, seconds, counts, results, mode, num_paddings = data
    if not math.isfinite(_float(answered_at)):
        raise MessageError(f"answered_at={answered_at}")
    if not 0 <= _float(seconds) < math.inf:
        raise MessageError(f"seconds={seconds}")
    step_id, token_ids = _int(step_id), _ints(ids)
    columns = None if logprobs is None else _logprobs(step_id, len(token_ids), logprobs)
    rows = [RowError(_int(i), _text(kind), _text(message)) for i, kind, message in errors]
    output = ModelRunnerOutput(step_id, token_ids, columns, rows, answered_at, seconds)
    output.graph_mode, output.num_paddings = _int(mode), _int(num_paddings)
    if not 0 <= output.graph_mode <= 2 or output.num_paddings < 0:
        raise MessageError(f"step {step_id}: graph_mode={mode}, num_paddings={num_paddings}")
    if counts is not None:
        output.counts = _ints(counts)
        if min(output.counts, default=0) < 0 or sum(output.counts) != len(token_ids):
            raise MessageError(f"step {step_id}: counts that do not fit the tokens")
    if results is not None:
        output.results = ResultColumns(_ints(results[0]), _ints(results[1]), _floats(results[2]))
        sizes = output.results.sizes
        fits = len(output.results.batch_idx) == len(sizes) and sum(sizes) == len(output.results.values)
        if not fits or min(sizes, default=0) < 0:
            raise MessageError(f"step {step_id}: results that do not fit their sizes")
    return output


def _logprobs(step_id: int, num_tokens: int, data: Any) -> LogprobColumns:
    token_idx, sampled, counts, likeliest, values = data
    columns = LogprobColumns(_ints(token_idx), _floats(sampled), _ints(counts), _ints(likeliest), _floats(values))
    if not len(columns.token_idx) == len(columns.sampled) == len(columns.counts):
        raise MessageError(f"step {step_id}: logprob columns of unequal length")
    if not sum(columns.counts) == len(columns.token_ids) == len(columns.values):
        raise MessageError(f"step {step_id}: logprob columns of unequal length")
    if min(columns.counts, default=0) < 0 or not all(0 <= i < num_tokens for i in columns.token_idx):
        raise MessageError(f"step {step_id}: logprobs of tokens that are not in the answer")
    return columns


def _ready(data: Any) -> None:
    _int(data.get("pid"))


def _at_least_one(data: Any, names: tuple[str, ...]) -> None:
    for name in names:
        if _int(data.get(name)) < 1:
            raise MessageError(f"{name}={data[name]} is not possible")
    for kind, block_size, window, *drafts in data.get("kv_groups", ()):
        numbers = _int(block_size) - 1, _int(window), *map(_int, drafts)
        if _text(kind) not in ("full", "window", "state") or len(numbers) > 3 or min(numbers) < 0:
            raise MessageError(f"a KV group of kind={kind:.80} block_size={block_size} window={window} is not possible")


def _progress(data: Any) -> None:
    counts = {name: _int(data.pop(name)) for name in ("done", "total") if name in data}
    for name, value in data.items():
        if name not in ("stage", "unit", "detail"):
            raise MessageError(f"PROGRESS with an unknown {name!r:.80}")
        _text(value)
    data.update(counts)
    _text(data.get("stage"))


def _error(data: Any) -> None:
    for name in ("type", "message", "traceback"):
        _text(data.get(name))


def _log(data: Any) -> None:
    for name in LOG_TEXTS:
        _text(data.get(name))
    if not 0 <= _int(data.get("level")) <= 1000 or not 0 <= _int(data.get("line")) < 1 << 31:
        raise MessageError(f"LOG with level={data['level']} and line={data['line']}")
    if not 0 <= _float(data.get("created")) < 1e11:  # a NaN is refused too
        raise MessageError(f"LOG created at {data['created']}")


def _reply(data: Any) -> None:
    if "error" in data:
        _error(data["error"])
    elif "value" not in data:
        raise MessageError("a REPLY with neither a value nor an error")


def _revoke(data: Any) -> None:
    if len(data) != 2 or not 0 <= _int(data[0]) <= _int(data[1]):
        raise MessageError("REVOKE of what is not a range of steps")


def _join(data: Any) -> None:
    sizes, has_prompts = data
    if not sizes or min(map(_int, sizes)) < 0 or type(has_prompts) is not bool:
        raise MessageError("JOIN of a round without sizes")


def _revoked(data: Any) -> None:
    if _int(data) < 0:
        raise MessageError(f"REVOKED with {data}")


_CHECKS: dict[Kind, Callable[[Any], None]] = {
    Kind.PROFILED: partial(_at_least_one, names=_OFFER_COUNTS),
    Kind.ALLOCATE: partial(_at_least_one, names=PLAN_LIMITS),
    Kind.READY: _ready,
    Kind.PROGRESS: _progress,
    Kind.ERROR: _error,
    Kind.REPLY: _reply,
    Kind.LOG: _log,
    Kind.REVOKE: _revoke,
    Kind.JOIN: _join,
    Kind.REVOKED: _revoked,
}
_NUMBERS = struct.Struct("<3i2didq3d4i")
_NUMBERS_OF = attrgetter(
    *("req_idx", "num_prompt_tokens", "num_computed_tokens", "temperature", "top_p", "top_k", "min_p", "seed"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "logprobs", "min_tokens", "max_num_tokens"),
    "results_from",
)
"""The fields of NewRequest that are numbers, in its order."""
_MOST_EXTRAS = 64


def _int(value: object) -> int:
    if type(value) is not int:
        raise MessageError(f"expected an integer, not {type(value).__name__}")
    return value


def _float(value: object) -> float:
    if type(value) is not float and type(value) is not int:
        raise MessageError(f"expected a number, not {type(value).__name__}")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise MessageError(f"expected a text, not {type(value).__name__}")
    return value


def _bytes(value: object) -> bytes:
    if type(value) is not bytes:
        raise MessageError(f"expected bytes, not {type(value).__name__}")
    return value


def int32_of(extra: list[bytes], num_columns: int) -> list[array[int]]:
    """Return the int32 columns of a feature's extra. Raises MessageError if it is not so many, whole ones."""
    if len(extra) != num_columns or any(len(column) % 4 for column in extra):
        raise MessageError(f"{len(extra)} columns instead of {num_columns}, or one that ends within a number")
    return [_ints(column) for column in extra]


def _ints(value: object) -> array[int]:
    column = array("i")
    column.frombytes(_bytes(value))
    return column


def _floats(value: object) -> array[float]:
    column = array("f")
    column.frombytes(_bytes(value))
    return column
