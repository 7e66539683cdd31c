"""Logits processors of the caller's: what is loaded, what rows they get, and whom their faults concern."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
import torch
from callers_processors import Nothing, Raised, Residues
from runner_fakes import FakeModel, expected_logits, make_runner, request, step
from torch import Tensor

from aengine.engine.delivery import request_error
from aengine.engine.sampling_extras import extras_of
from aengine.errors import InvalidRequestError, ModelLoadError
from aengine.ipc.messages import ModelRunnerOutput
from aengine.limits.arguments import check_schema, fault_in
from aengine.params import SamplingParams
from aengine.runner.model_runner import ModelRunner
from aengine.runner.sampling.features.thinking_budget import ThinkingBudget
from aengine.runner.sampling.processors import LogitsProcessor, ProcessedRows, load_processors, make_processor

VOCAB = 23


def new_runner(*processors: type[LogitsProcessor]) -> ModelRunner:
    return make_runner(FakeModel(VOCAB, 40, 4), VOCAB, num_blocks=40, block_size=4, processors=processors)


def asking(row: int, prompt: list[int], **extra_args: Any) -> Any:
    extras = extras_of(SamplingParams(extra_args=extra_args))
    return request(row, prompt, range(6 * row, 6 * row + 6), extras=extras)


def test_rows_and_tokens(rng: random.Random) -> None:
    """Each row's tokens and arguments are its own, beside rows that don't use it, and when they come again."""
    runner = new_runner(Nothing, Residues)
    prompts = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, 7))] for _ in range(5)]
    moduli = [None, 3, 2, None, 5]
    asked = [{} if modulus is None else {"residues": {"modulus": modulus}} for modulus in moduli]
    texts = [list(prompt) for prompt in prompts]
    new, removed = [asking(row, prompts[row], **asked[row]) for row in range(5)], []
    batch = {row: len(prompts[row]) for row in range(5)}
    for k in range(10):
        got = step(runner, batch, new=new, removed=removed)
        assert got.errors == []
        for row, token_id in zip(batch, got.token_ids, strict=True):
            logits, text, modulus = expected_logits(texts[row], VOCAB), texts[row], moduli[row]
            if modulus is not None:
                ids = torch.arange(VOCAB)
                logits[(ids + text[-1] + len(text)) % modulus == 0] = -torch.inf
            assert token_id == int(logits.argmax())
            text.append(token_id)
        new, removed, batch = [], [], dict.fromkeys(range(5), 1)
        if k == 4:
            again = request(2, texts[2], range(12, 18), num_prompt_tokens=len(prompts[2]))
            again.extras |= extras_of(SamplingParams(extra_args=asked[2]))
            new, removed, batch[2] = [again], [2], len(texts[2])


def test_faults_concern_their_own_requests() -> None:
    runner = new_runner(Residues)
    new = [asking(row, [1, 2], residues={"modulus": modulus}) for row, modulus in enumerate((999, 998))]
    got = step(runner, {0: 2, 1: 2, 2: 2}, new=[*new, request(2, [1, 2], range(12, 18))])
    assert [(error.batch_idx, error.type) for error in got.errors] == [(0, "InvalidRequestError")] + [
        (1, "InvalidRequestError")
    ]
    refused = request_error(got.errors[0], ["residues"])
    assert isinstance(refused, InvalidRequestError) and (str(refused), refused.param) == (
        "999 is not prime",
        "extra_args",
    )
    assert "RuntimeError('out of luck')" in got.errors[1].message
    assert got.token_ids[2] == int(expected_logits([1, 2], VOCAB).argmax())
    runner = new_runner(Residues)
    got = step(
        runner, {0: 2, 1: 2}, new=[asking(0, [1, 2], residues={"modulus": 997}), request(1, [1, 2], range(6, 12))]
    )
    assert [error.batch_idx for error in got.errors] == [0]
    assert str(request_error(got.errors[0], ["residues"])).startswith("logits processor residues: ")
    assert got.token_ids[1] == int(expected_logits([1, 2], VOCAB).argmax())


@pytest.mark.parametrize("error", [ValueError("no"), SystemExit("no"), KeyboardInterrupt("no")], ids=repr)
def test_whatever_a_processor_raises_is_said_once(error: BaseException, caplog: pytest.LogCaptureFixture) -> None:
    """Also by the steps that are on their way when it fails, of which the host hears later."""

    class Raising(Nothing):
        name = "raising"
        changes_argmax = True

        def prepare(self, arguments: Any) -> Any:
            if arguments:
                raise error
            return np.zeros(1)

        def process(self, logits: Tensor, rows: ProcessedRows) -> None:
            raise error

    runner = new_runner(Raising)
    new = [asking(0, [1, 2], raising={}), request(1, [1, 2], range(6, 12)), asking(2, [1, 2], raising={"a": 1})]
    for batch in ({0: 2, 1: 2, 2: 2}, {0: 1, 1: 1}):
        got = step(runner, batch, new=new)
        new = []
        said = [str(request_error(one, ["raising"])) for one in got.errors]
        assert said[0] == f"logits processor raising: {error!r}"
        assert said[1:] == [f"extra_args: raising can't take its arguments: {error!r}"] * (2 in batch)
        assert got.token_ids[1] >= 0
    assert [record.getMessage() for record in caplog.records] == [
        "logits processor raising: a request is refused",
        "logits processor raising: the requests that use it fail",
    ]


def test_processors_that_forbid_every_token_are_named() -> None:
    class Forbidding(Nothing):
        name = "forbidding"
        changes_argmax = True

        def process(self, logits: Tensor, rows: ProcessedRows) -> None:
            logits[rows.places] = -torch.inf

    (error,) = step(new_runner(Forbidding), {0: 2}, new=[asking(0, [1, 2], forbidding={})]).errors
    said = request_error(error, ["forbidding", "other"])
    assert isinstance(said, InvalidRequestError) and "extra_args" in error.message
    assert str(said) == f"{error.message}; its logits processors may have done it: forbidding, other"


def test_other_requests_are_not_harmed_by_what_a_processor_does_wrong() -> None:
    class Resizing(Nothing):
        name = "resizing"
        changes_argmax = True

        def process(self, logits: Tensor, rows: ProcessedRows) -> None:
            logits.resize_(1, 1)

    class Raising(Resizing):
        name = "raising"

        def add_request(self, request: Any) -> None:
            if self.extra in request.extras:
                raise KeyError("its own mistake")

    for wrong in (Resizing, Raising):
        new = [asking(0, [1, 2], **{wrong.name: {}}), request(1, [1, 2], range(6, 12))]
        answer = step(new_runner(wrong), {0: 2, 1: 2}, new=new)
        assert answer.token_ids[1] == int(expected_logits([1, 2], VOCAB).argmax())
        assert [error.batch_idx for error in answer.errors] == ([0] if wrong is Raising else [])


def prepared(state: Any) -> tuple[ModelRunnerOutput, list[Tensor]]:
    """Return the answer to a step of a request of which `prepare` returns this and of one without, and what `process`
    has got of it."""
    got: list[Tensor] = []

    class Given(Nothing):
        name = "given"
        changes_argmax = True

        def prepare(self, arguments: Any) -> Any:
            return state

        def process(self, logits: Tensor, rows: ProcessedRows) -> None:
            got.extend(rows.states)

    new = [asking(0, [1, 2], given={}), request(1, [1, 2], range(6, 12))]
    return step(new_runner(Given), {0: 2, 1: 2}, new=new), got


@pytest.mark.parametrize(
    "state",
    [
        np.array([10**30]),
        np.array(["a"]),
        np.array([b"a"]),
        np.array([1j]),
        np.array(["2026-01-01"], dtype="M8[D]"),
        np.array([1.5], dtype=np.longdouble),
        np.zeros(2, dtype="i4,f4"),
        np.zeros(2**20 + 1, dtype=np.uint8),
        np.broadcast_to(0.0, (2**40,)),
        np.zeros((1,) * 9),
        [[1], [2, 3]],
        None,
    ],
    ids=lambda state: f"{getattr(state, 'dtype', state)}",
)
def test_what_can_not_be_copied_to_the_device_is_refused(state: Any) -> None:
    answer, got = prepared(state)
    assert [(error.batch_idx, error.type) for error in answer.errors] == [(0, "InvalidRequestError")] and not got
    assert "given can't take its arguments" in answer.errors[0].message and len(answer.errors[0].message) < 300
    assert answer.token_ids[1] == int(expected_logits([1, 2], VOCAB).argmax())


@pytest.mark.parametrize(
    "state",
    [
        *(np.array([1, 0], dtype=kind) for kind in ("?", "u1", "u2", "u4", "u8", "i8", "f2", "f8", ">i4", ">f8")),
        np.arange(6.0).reshape(2, 3).T[::-1],
        np.broadcast_to(3, (2, 2)),
        np.zeros(2**20, dtype=np.uint8),
        np.zeros((0, 3)),
        [1, 2],
        5,
        torch.ones(2),
    ],
    ids=lambda state: f"{getattr(state, 'dtype', state)}",
)
def test_arrays_of_any_kind_of_number_come_to_the_device(state: Any) -> None:
    answer, got = prepared(state)
    assert not answer.errors
    assert got[0].tolist() == np.asarray(state).tolist()


def test_one_that_changes_no_maximum_is_not_given_greedy_requests() -> None:
    runner = new_runner(Nothing)
    asked = [asking(row, [1, 2], nothing={}) for row in range(2)]
    asked[1].temperature = 1.0
    step(runner, {0: 2, 1: 2}, new=asked)
    rows = torch.arange(2).numpy()
    assert not runner.sampler.is_op_by_op(rows[:1]) and runner.sampler.is_op_by_op(rows)


def test_one_that_graphs_hold() -> None:
    """Its ops are among those of `sample_padded`, for padded rows; no step runs op by op because of it."""
    runner = new_runner(Raised)
    step(runner, {0: 2, 1: 2}, new=[asking(0, [1, 2], raised=[7, 100]), request(1, [1, 2], range(6, 12))])
    assert not runner.sampler.is_op_by_op(torch.arange(2).numpy())
    logits = torch.zeros((3, VOCAB))
    logits[:, 3] = 1.0
    rows = torch.tensor([0, 1, -1])
    feature: Any = Raised(runner.requests, VOCAB)
    feature.add_request(asking(0, [1, 2], raised=[7, 100]))
    feature.apply(logits, rows.numpy()[:0], rows, None, None)
    assert logits.argmax(1).tolist() == [7, 3, 3]
    assert int(step(runner, {0: 1, 1: 1}).token_ids[0]) == 7


def test_a_thinking_budget(rng: random.Random) -> None:
    """Reasoning that is open in the prompt, or opened in the completion; ends of one token and of several, of which the
    text has some already; closed reasoning, of which none is left, is not ended again."""
    runner = new_runner(ThinkingBudget)
    begin, end, budget = [1], [5, 6, 7], 4
    prompts = [[1], [2, 1, 3], [1, 9, 5, 6, 7, 3], [2, 3], [1, 8, 8, 8, 5, 6], [1, 8, 8, 8, 8, 5]]
    own = {"tokens": budget, "begin": begin, "end": end}
    batch, texts = {row: len(prompt) for row, prompt in enumerate(prompts)}, [list(prompt) for prompt in prompts]
    new = [asking(row, prompt, thinking_budget=own) for row, prompt in enumerate(prompts)]
    forced = 0
    for _ in range(12):
        got = step(runner, batch, new=new)
        assert got.errors == []
        for text, token_id in zip(texts, got.token_ids, strict=True):
            opened = max((i + 1 for i, one in enumerate(text) if one == 1), default=0)
            closed = max((i for i in range(len(text) + 1) if text[i - 3 : i] == end), default=0)
            expected = int(expected_logits(text, VOCAB).argmax())
            if opened > closed and len(text) - opened >= budget:
                expected = end[next(k for k in (2, 1, 0) if text[len(text) - k :] == end[:k])]
                forced += 1
            assert token_id == expected
            text.append(token_id)
        batch, new = dict.fromkeys(range(len(prompts)), 1), []
    assert forced >= 8


def test_a_text_that_is_but_the_beginning_of_an_end() -> None:
    """What begins this reasoning is the first token of what ends it."""
    runner = new_runner(ThinkingBudget)
    own = {"tokens": 0, "begin": [5], "end": [5, 6]}
    assert step(runner, {0: 1}, new=[asking(0, [5], thinking_budget=own)]).token_ids[0] == 6
    assert step(runner, {0: 1}).token_ids[0] == int(expected_logits([5, 6], VOCAB).argmax())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["callers_processors:Nameless"], "its name is no identifier"),
        (["callers_processors:Unclear"], "the keyword 'pattern' is not known here"),
        (["callers_processors:Missing"], "callers_processors:Missing' can't be used: AttributeError"),
        (["no_such_module:X"], "ModuleNotFoundError"),
        (["builtins:dict"], "no subclass of LogitsProcessor"),
        (["another"], "this worker finds no such processor; there are 'thinking_budget'"),
        (["callers_processors:Nothing"] * 2, "several are called nothing"),
    ],
    ids=str,
)
def test_what_can_not_be_loaded(names: list[str], message: str) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_processors(names)


def test_what_is_loaded() -> None:
    assert load_processors(["callers_processors:Residues", "thinking_budget"]) == (Residues, ThinkingBudget)


OBJECT = {
    "type": "object",
    "properties": {"a": {"type": "integer", "minimum": 1}, "b": {"type": "array", "items": {"type": "integer"}}},
}


@pytest.mark.parametrize(
    ("schema", "value", "fault"),
    [
        ({"type": "integer", "minimum": 1, "maximum": 3}, 2, ""),
        ({"type": "integer", "minimum": 1}, 0, "x=0 must be from 1 to infinity"),
        ({"type": "number", "maximum": 3}, 3.5, "x=3.5 must be from -infinity to 3"),
        ({"type": "integer"}, -(2**63), ""),
        ({"type": "integer"}, 2**63, "x=9223372036854775808: an integer must be from -2**63 to 2**63 - 1"),
        ({"type": "number", "maximum": 2**70}, -(2**63) - 1, "x=-9223372036854775809: an integer must be"),
        ({"type": "number"}, 1e30, ""),
        ({"type": "array", "items": {"type": "integer"}}, [1, 10**30], "x[1]=1000"),
        ({"type": "integer"}, True, "x=True must be of type integer"),
        ({"type": "boolean"}, 1, "x=1 must be of type boolean"),
        ({"type": "boolean"}, False, ""),
        ({"type": "number"}, 1, ""),
        ({"type": "string", "enum": ["a", "b"]}, "c", "x='c' must be one of"),
        ({"type": "string", "enum": ["a", "b"]}, "b", ""),
        ({"type": "array", "items": {"type": "string"}}, ["a", 1], "x[1]=1 must be of type string"),
        (
            {"type": "array", "items": {"type": "integer"}, "minItems": 1},
            [],
            "x has 0 items: there must be 1 to any number of",
        ),
        ({"type": "array", "items": {"type": "integer"}, "maxItems": 1}, [1, 2], "x has 2 items: there must be 0 to 1"),
        (OBJECT, {"a": 1, "b": [2]}, ""),
        (OBJECT, {}, ""),
        (OBJECT, {"a": 0}, "x.a=0 must be from 1"),
        (OBJECT, {"c": 0}, "x has no 'c'; there are a, b"),
        (OBJECT | {"required": ["b"]}, {"a": 1}, "x needs b"),
        (OBJECT, [], "x=[] must be of type object"),
    ],
    ids=str,
)
def test_arguments(schema: dict[str, Any], value: Any, fault: str) -> None:
    check_schema(schema)
    found = fault_in(value, schema, "x")
    assert found.startswith(fault) and bool(found) == bool(fault)


@pytest.mark.parametrize(
    "schema",
    [
        5,
        {},
        {"type": "tuple"},
        {"type": "array"},
        {"type": "array", "items": {"type": "x"}},
        {"type": "object", "properties": {"a": {}}},
    ],
    ids=str,
)
def test_schemas_that_are_not_known(schema: Any) -> None:
    with pytest.raises(ValueError, match="is no schema"):
        check_schema(schema)


@pytest.mark.parametrize("keyword", ["enum", "minimum", "maxItems", "items", "properties", "required"])
def test_keywords_of_the_wrong_type(keyword: str) -> None:
    with pytest.raises(ValueError, match=f"{keyword}='x' in .* is of another type"):
        check_schema({"type": "array", keyword: "x"})


@pytest.mark.parametrize(
    ("init", "message"),
    [
        (lambda self: None, "TypeError"),
        (lambda self, requests, vocab_size: None, "has to call super"),
        (lambda self, requests, vocab_size: 1 // 0, "ZeroDivisionError"),
    ],
    ids=["signature", "no super", "raises"],
)
def test_what_can_not_be_made(init: Any, message: str) -> None:
    processor = type("Own", (Residues,), {"name": "own", "__init__": init})
    with pytest.raises(ModelLoadError, match=f"own can't be made: .*{message}"):
        make_processor(processor, new_runner().requests, 8)
