"""lm-eval's model, over the fake engine and as much of lm-eval as it is built on; tests/clients has the whole of it."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from aengine.testing import FakeLLM


class TemplateLM:
    """What lm-eval's base class does that matters here: it encodes pairs, and gives their ids on."""

    def loglikelihood(self, requests: list[Any]) -> Any:
        encoded = [(one.args, *(self.tok_encode(text) for text in one.args)) for one in requests]  # type: ignore[attr-defined]
        return self._loglikelihood_tokens(encoded)  # type: ignore[attr-defined]


def windows(ids: list[int], prefix: int, length: int, context: int) -> Iterator[tuple[list[int], list[int]]]:
    for i in range(0, len(ids), length):
        yield [prefix], ids[i : i + length]


@pytest.fixture
def lm_eval(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, parts in {
        "lm_eval": {},
        "lm_eval.api": {},
        "lm_eval.api.model": {"TemplateLM": TemplateLM},
        "lm_eval.utils": {"get_rolling_token_windows": windows, "make_disjoint_window": lambda pair: pair},
    }.items():
        module = ModuleType(name)
        module.__dict__.update(parts)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "aengine.integrations.lm_eval", raising=False)


@pytest.mark.usefixtures("lm_eval")
def test_each_kind_of_request_is_answered() -> None:
    from aengine.integrations.lm_eval import AEngineLM

    with FakeLLM("the answer. And more", max_model_len=64) as llm:
        lm = AEngineLM(llm, num_concurrent=2)
        pairs = [SimpleNamespace(args=("a" * length, "bc")) for length in (3, 62, 500)]  # the last are cut
        assert lm.loglikelihood(pairs) == [(0.0, True)] * 3
        assert lm.loglikelihood_rolling([SimpleNamespace(args=("x" * 150,))]) == [0.0]
        asked = [{"until": ["."], "max_gen_toks": 30}, {"until": "n", "do_sample": False}, {"max_gen_toks": 3}]
        texts = lm.generate_until([SimpleNamespace(args=("q" * 200, how)) for how in asked])
        assert texts == ["the answer", "the a", "the"]
        assert lm.eot_token_id in llm.tokenizer.eos_token_ids and lm.tokenizer_name
