"""What the tests of grammars are run with: the backend over each vocabulary."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from grammar_helpers import BUILT, TOKENIZERS, backend_of

from aengine.engine.structured.backend import Backend
from aengine.engine.tokenizer.tokenizer import Tokenizer


@pytest.fixture(scope="module", autouse=True)
def _close_backends() -> Iterator[None]:
    """After each file: other tests look for processes that were left behind."""
    yield
    for backend in BUILT.values():
        backend.close()
    BUILT.clear()


@pytest.fixture(params=list(TOKENIZERS))
def vocabulary_name(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def backend(vocabulary_name: str) -> Backend:
    return backend_of(vocabulary_name)


@pytest.fixture
def tokenizer(vocabulary_name: str) -> Tokenizer:
    return TOKENIZERS[vocabulary_name][0]()
