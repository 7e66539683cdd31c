"""The bitmasks of a request with drafts: one for the token after its known ones, and one after each draft."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator
from typing import Any

import numpy as np
import pytest
from grammar_helpers import allowed_by, backend_of, schema_spec, smollm2, text_ids

from aengine.engine.structured import backend as structured_backend
from aengine.engine.structured.backend import Backend
from aengine.engine.structured.bitmasks import BitmaskFiller, Filled, MaskJob, RequestGrammar

SCHEMA = {
    "type": "object",
    "properties": {"is_a_customer": {"enum": ["yes", "no"]}, "name": {"type": "string", "maxLength": 9}},
    "required": ["is_a_customer", "name"],
    "additionalProperties": False,
}
TEXT = '{"is_a_customer": "no", "name": "Ada"}'


@pytest.fixture(scope="module")
def backend() -> Backend:
    return backend_of("smollm2")


async def fill(filler: BitmaskFiller, jobs: list[MaskJob]) -> tuple[Filled, np.ndarray]:
    rows = bytearray(filler.row_bytes * sum(job.num_rows for job in jobs))
    filled = filler.fill(jobs, rows)
    done = filled if isinstance(filled, Filled) else await filled.filled
    return done, np.frombuffer(rows, dtype="<i4").reshape(-1, filler.row_bytes // 4)


@pytest.fixture
async def filler(backend: Backend) -> AsyncIterator[BitmaskFiller]:
    made = BitmaskFiller(backend.vocabulary.vocab_size)
    yield made
    await made.aclose()


async def test_each_row_is_that_of_the_drafts_before_it(
    backend: Backend, filler: BitmaskFiller, rng: random.Random
) -> None:
    """Whatever is drafted: to the first draft that is not allowed the rows are those of a request that got them; and
    the next rows are those of what the request really got."""
    ids = text_ids(smollm2(), TEXT)
    vocab_size = backend.vocabulary.vocab_size
    compiled = backend.compile(schema_spec(SCHEMA))
    for _ in range(12):
        grammar = RequestGrammar(compiled)
        place, known = 0, []
        while place < len(ids):
            drafts = [
                i if rng.random() < 0.8 else rng.randrange(vocab_size) for i in ids[place : place + rng.randint(0, 9)]
            ]
            filled, rows = await fill(filler, [MaskJob(grammar, known, drafts)])
            assert not filled.failed and len(rows) == len(drafts) + 1
            reference, is_allowed = compiled.matcher(), True
            assert reference.accept(ids[:place]) == place
            for row, draft in zip(rows, [*drafts, None], strict=True):
                if not is_allowed:
                    assert (row == -1).all()
                    continue
                expected = np.zeros((1, rows.shape[1]), dtype=np.int32)
                reference.fill(expected, 0)
                assert (row == expected[0]).all()
                is_allowed = draft is not None and draft in allowed_by(row) and reference.accept([draft]) == 1
            known = ids[place : place + rng.randint(1, len(drafts) + 1)]
            place += len(known)


async def test_what_is_forced_after_drafts(backend: Backend, filler: BitmaskFiller) -> None:
    """As when nothing was drafted, and all of it had come."""
    compiled = backend.compile(schema_spec(SCHEMA))
    ids = text_ids(smollm2(), '{"is_a_customer": "yes')
    after = text_ids(smollm2(), '{"is_a_customer": "yes", "name": "')[len(ids) :]
    job = MaskJob(RequestGrammar(compiled), ids[:1], ids[1:], wants_forced=True)
    forced = (await fill(filler, [job]))[0].forced[0]
    plain = MaskJob(RequestGrammar(compiled), ids, wants_forced=True)
    assert forced == (await fill(filler, [plain]))[0].forced[0] and forced[: len(after)] == after[: len(forced)]


async def test_certain_drafts_have_one_row(backend: Backend, filler: BitmaskFiller) -> None:
    """That of a request that got them; beside others, and however often it is filled: they come with the answer."""
    compiled = backend.compile(schema_spec(SCHEMA))
    ids = text_ids(smollm2(), TEXT)
    others = [MaskJob(RequestGrammar(compiled), ids[:k]) for k in range(8)]
    grammar = RequestGrammar(compiled)
    filled, rows = await fill(filler, [MaskJob(grammar, ids[:1], ids[1:5], are_certain=True), *others])
    assert not filled.failed and len(rows) == 9
    again, repeated = await fill(filler, [MaskJob(grammar, [], ids[1:5], are_certain=True)])
    _, expected = await fill(filler, [MaskJob(RequestGrammar(compiled), ids[:5])])
    assert not again.failed and (rows[0] == expected[0]).all() and (repeated[0] == expected[0]).all()
    wrong = MaskJob(RequestGrammar(compiled), ids[:1], [ids[5]], are_certain=True)
    filled, rows = await fill(filler, [wrong, others[0]])
    assert list(filled.failed) == [0] and (rows[0] == -1).all() and (rows[1] != -1).any()


async def test_a_refused_token_before_the_drafts_fails_alone(backend: Backend, filler: BitmaskFiller) -> None:
    compiled = backend.compile(schema_spec(SCHEMA))
    ids = text_ids(smollm2(), TEXT)
    jobs = [MaskJob(RequestGrammar(compiled), known, ids[1:3]) for known in (ids[:1], [ids[5]], ids[:1])]
    filled, rows = await fill(filler, jobs)
    assert list(filled.failed) == [1] and (rows[3:6] == -1).all()
    assert (rows[:3] == rows[6:]).all() and (rows[0] != -1).any()


async def test_requests_without_drafts_are_filled_at_once(
    backend: Backend, filler: BitmaskFiller, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beside some with drafts; one whose tokens are refused fails at its place, and is forced at its own."""
    compiled = backend.compile(schema_spec(SCHEMA))
    ids = text_ids(smollm2(), TEXT)
    together: list[int] = []
    advance_batch = structured_backend.advance_batch

    def noted(items: Any, *args: Any) -> Any:
        together.append(len(items))
        return advance_batch(items, *args)

    monkeypatch.setattr(structured_backend, "advance_batch", noted)
    known = [ids[:1], ids[:3], [ids[5]], ids[:2], *[ids[:k] for k in range(6)]]
    drafts = {0: ids[1:3], 3: ids[2:6]}
    new = [RequestGrammar(compiled) for _ in known]
    jobs = [MaskJob(new[i], own, drafts.get(i, []), wants_forced=i == 9) for i, own in enumerate(known)]
    filled, rows = await fill(filler, jobs)
    assert together == [8] and list(filled.failed) == [2]
    places = np.cumsum([0, *(job.num_rows for job in jobs)])
    for i, (own, place) in enumerate(zip(known, places, strict=False)):
        alone, expected = await fill(
            filler, [MaskJob(RequestGrammar(compiled), own, drafts.get(i, []), wants_forced=i == 9)]
        )
        assert (rows[place : place + len(expected)] == expected).all()
        assert filled.forced.get(i) == alone.forced.get(0)
