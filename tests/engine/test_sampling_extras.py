"""What sampling parameters become in a request's message."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from aengine import InvalidRequestError, SamplingParams
from aengine.engine.sampling_extras import encode_bad_words, extras_of
from aengine.ipc.messages import int32_of

sys.path.append(str(Path(__file__).parents[1] / "tokenizer"))


def test_nothing_is_asked_for() -> None:
    assert extras_of(SamplingParams(temperature=0.5, stop_token_ids=[5], min_tokens=3)) == {}


def test_columns() -> None:
    extras = extras_of(SamplingParams(allowed_token_ids=[5, 3]), [[1, 2, 3], [4]])
    assert [list(column) for column in int32_of(extras["allowed_token_ids"], 1)] == [[5, 3]]
    assert [list(column) for column in int32_of(extras["bad_words"], 2)] == [[3, 1], [1, 2, 3, 4]]


def test_a_word_is_meant_with_and_without_a_blank() -> None:
    """As vLLM has it: the second only if it has another first token and as many tokens."""
    from tokenizer_helpers import smollm2

    tokenizer = smollm2()

    def texts(*words: str) -> list[str]:
        return [tokenizer.decode(ids) for ids in encode_bad_words(tokenizer, words)]

    assert texts("Paris") == texts(" Paris") == ["Paris", " Paris"]
    assert texts("Paris", "the largest") == ["Paris", " Paris", "the largest", " the largest"]
    assert [len(ids) for ids in encode_bad_words(tokenizer, ["<|im_end|>"])] == [1]
    with pytest.raises(InvalidRequestError, match="tokens: 1 to 32") as caught:
        encode_bad_words(tokenizer, ["fine", "0123456789" * 4])
    assert caught.value.param == "bad_words"
