"""Integrations whose framework is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

FRAMEWORKS = [
    ("pydantic_ai", "pydantic_ai", "pydantic-ai"),
    ("openai_agents", "agents", "openai-agents"),
    ("langchain", "langchain_core", "langchain"),
    ("llama_index", "llama_index", "llama-index"),
    ("dspy", "dspy", "dspy"),
    ("litellm", "litellm", "litellm"),
    ("smolagents", "smolagents", "smolagents"),
]


@pytest.mark.parametrize(("module", "package", "extra"), FRAMEWORKS, ids=[name for name, *_ in FRAMEWORKS])
def test_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch, module: str, package: str, extra: str) -> None:
    name = f"aengine.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [package, *(other for other in sys.modules if other.startswith(f"{package}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(ImportError, match=rf"pip install 'aengine\[{extra}\]'"):
        importlib.import_module(name)
