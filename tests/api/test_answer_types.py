"""An ``output_type`` through the engine: relaxed, and validated once."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import ClassVar

import pytest
from pydantic import BaseModel, Field, field_validator

from aengine import AsyncLLM, GrammarError, InvalidRequestError, StructuredOutput

Make = Callable[..., AsyncLLM]
pytestmark = pytest.mark.usefixtures("no_blocking")


def any_token(engine: AsyncLLM, seed: int) -> None:
    engine.executor.choose = random.Random(seed).choice


class Counted(BaseModel):
    yes: bool
    checks: ClassVar[int] = 0

    @field_validator("yes")
    @classmethod
    def check(cls, value: bool) -> bool:
        cls.checks += 1
        return value


async def test_validated_once(make_engine: Make) -> None:
    Counted.checks = 0
    async with make_engine() as engine:
        stream = engine.stream([5], output_type=Counted)
        await stream.wait()
        assert stream.completion.parsed is stream.completion.parsed and Counted.checks == 1
    with pytest.raises(InvalidRequestError, match="output_type=Counted"):
        StructuredOutput(json_schema=Counted)  # type: ignore[arg-type]


class Word(BaseModel):
    text: str = Field(max_length=3, json_schema_extra={"not": {"const": "abc"}})


@pytest.mark.parametrize("own_thread", [False, True])
async def test_a_type_may_be_relaxed_and_is_validated_all_the_same(make_engine: Make, own_thread: bool) -> None:
    async with make_engine(own_thread=own_thread) as engine:
        any_token(engine, 3)
        for _ in range(2):  # described in a thread, and known
            with pytest.raises(GrammarError, match='on_unsupported="relax"'):
                await engine.generate([5], output_type=Word)
        completion = await engine.generate([5], output_type=Word, on_unsupported="relax")
        assert completion.warnings
        assert completion.finish_reason == "length" or completion.parsed or completion.parse_error
        for wrong in ({}, {"output_type": Word, "on_unsupported": "ignore"}):
            with pytest.raises(InvalidRequestError) as caught:
                await engine.generate([5], **({"on_unsupported": "relax"} | wrong))
            assert caught.value.param == "on_unsupported"
