"""Log-probabilities are columns until they are read, and then what they always were."""

from __future__ import annotations

import copy
import pickle
from array import array
from typing import Any

import pytest

from aengine import SamplingParams
from aengine.engine.streams import logprobs
from aengine.engine.streams.logprobs import Logprobs, LogprobTable
from aengine.outputs import Logprob
from aengine.remote.wire import from_wire, pack, to_wire, unpack
from aengine.server.openai.answers import tokens_at_once
from aengine.testing import FakeAsyncLLM

ROWS = [(Logprob(5, -0.5), Logprob(5, -0.5), Logprob(6, -1.5)), (), (Logprob(8, -0.25), Logprob(1, -0.125))]


def table() -> tuple[Logprobs, list[Any]]:
    columns, top = LogprobTable(), []
    for row in ROWS:
        others = array("i", [one.token_id for one in row[1:]]), array("f", [one.logprob for one in row[1:]])
        top.append(columns.append(row[0].token_id if row else 9, (row[0].logprob, *others) if row else None))
    return Logprobs(columns, range(len(columns))), top


def test_they_are_as_a_tuple_of_tuples() -> None:
    whole, top = table()
    assert whole == ROWS and whole == tuple(ROWS) and tuple(ROWS) == whole and whole != ROWS[:2] and whole != "x"
    assert len(whole) == 3 and whole[-1] == ROWS[-1] and type(whole[0]) is tuple and type(whole[0][0]) is Logprob
    assert whole[1:] == ROWS[1:] and whole[::-1] == ROWS[::-1] and list(reversed(whole)) == ROWS[::-1]
    assert ROWS[0] in whole and whole.index(ROWS[2]) == 2 and hash(whole) == hash(tuple(ROWS))
    assert [list(one) for one in top] == [list(row[1:]) for row in ROWS] and top[0][::-1] == ROWS[0][:0:-1]
    with pytest.raises(IndexError):
        whole[3]
    assert repr(whole[2:]) == f"Logprobs([{ROWS[2]!r}])" and repr(top[2]) == f"TopLogprobs([{ROWS[2][1]!r}])"


def test_copies_have_what_they_show_and_nothing_else() -> None:
    whole, top = table()
    for part in (whole, whole[::-1], whole[2:], top[0], top[0][::-1]):
        copies = pickle.loads(pickle.dumps(part)), copy.copy(part), copy.deepcopy(part), unpack(pack([part]))[0]
        assert all(type(one) is type(part) and one == part for one in copies)
    assert len(pickle.dumps(whole[2:])) < len(pickle.dumps(whole))


async def test_none_is_made_before_it_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither while tokens come, nor on the way to another process, whole and streamed."""
    made: list[Logprob] = []

    def noted(*values: Any) -> Logprob:
        made.append(Logprob(*values))
        return made[-1]

    monkeypatch.setattr(logprobs, "Logprob", noted)
    async with FakeAsyncLLM("abc") as engine:
        params = SamplingParams(n=3, logprobs=4)
        whole = await engine.generate("x", params)
        tokens = [token async for token in engine.stream("x", params)]
        there = from_wire(type(whole), unpack(pack(to_wire(whole))))
        sent = unpack(pack(tokens))
        assert not made
        assert there.choices[2].logprobs is not None and len(there.choices[2].logprobs[1]) == 5
    assert len(made) == 5
    assert there.choices == whole.choices and [one[-1] for one in sent] == [token.top_logprobs for token in tokens]


def test_so_many_are_written_at_once() -> None:
    """What a slow reader finds is written in pieces, of fewer tokens the more each has to say."""
    assert tokens_at_once(None) == tokens_at_once(5) == 256
    assert tokens_at_once(64) == 31
