"""An `AsyncLLM` over the fake executor: everything is real but the worker."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from fakes import FakeExecutor
from own_thread_helpers import own_threads

from aengine import AsyncLLM, EngineConfig
from aengine.checkpoint.source import resolve_model
from aengine.engine import core
from aengine.engine.structured.llguidance import backend
from aengine.engine.structured.vocabulary import Vocabulary
from aengine.engine.tokenizer.tokenizer import Tokenizer

VOCAB_SIZE = 49152


def fake_token(req_idx: int, position: int) -> int:
    """Deterministic by position alone, and always a printable one of SmolLM2's."""
    return 260 + position % 997


class FakeLLM(AsyncLLM):
    """The engine over `FakeExecutor`; its constructor's options go to the executor."""

    def __init__(self, *, fake: dict[str, Any] | None = None, **config: Any) -> None:
        super().__init__("smollm2-135m", **{"preload_grammars": False, **config})
        self.fake = {"num_blocks": 512, "block_size": 16, "max_model_len": 1024, "token": fake_token} | (fake or {})

    def _make_executor(self, config: EngineConfig) -> FakeExecutor:
        self.executor = FakeExecutor(**self.fake)
        return self.executor


@pytest.fixture(scope="session")
def smollm2_tokenizer() -> Tokenizer:
    return Tokenizer.load(resolve_model(EngineConfig.create("smollm2-135m", {})))


class Made:
    """Vocabularies of one tokenizer, and the grammar library's tables of them: a third of a second each."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._make, self._make_tables = Vocabulary.of, backend.tables_of
        self._vocabularies: dict[int, Vocabulary] = {}
        self._tables: dict[int, backend.Tables] = {}
        self._lock = threading.Lock()

    def vocabulary(self, tokenizer: Tokenizer, vocab_size: int) -> Vocabulary:
        if tokenizer is not self._tokenizer:
            return self._make(tokenizer, vocab_size)
        with self._lock:
            if vocab_size not in self._vocabularies:
                self._vocabularies[vocab_size] = self._make(tokenizer, vocab_size)
        return self._vocabularies[vocab_size]

    def tables_of(self, vocabulary: Vocabulary) -> backend.Tables:
        if self._vocabularies.get(vocabulary.vocab_size) is not vocabulary:
            return self._make_tables(vocabulary)
        with self._lock:
            if vocabulary.vocab_size not in self._tables:
                self._tables[vocabulary.vocab_size] = self._make_tables(vocabulary)
        return self._tables[vocabulary.vocab_size]


@pytest.fixture(scope="session")
def made(smollm2_tokenizer: Tokenizer) -> Made:
    return Made(smollm2_tokenizer)


@pytest.fixture
def make_engine(smollm2_tokenizer: Tokenizer, made: Made, monkeypatch: pytest.MonkeyPatch) -> Callable[..., FakeLLM]:
    """A factory of engines that are not started. Their tokenizer and its tables are made once a session."""
    monkeypatch.setattr(core.Tokenizer, "load", classmethod(lambda cls, *args: smollm2_tokenizer))
    monkeypatch.setattr(Vocabulary, "of", made.vocabulary)
    monkeypatch.setattr(backend, "tables_of", made.tables_of)
    return FakeLLM


@pytest.fixture
def no_thread_left() -> Iterator[None]:
    """Engines end, and their threads with them."""
    yield
    for thread in own_threads():
        thread.join(5)
    assert not own_threads()


@pytest.fixture
def make(make_engine: Callable[..., FakeLLM]) -> Callable[..., FakeLLM]:
    """`make_engine`, with a thread of its own."""
    return lambda **config: make_engine(own_thread=True, **config)
