"""Integrations whose framework is not installed."""

from __future__ import annotations

import importlib
import sys

import pytest

FRAMEWORKS = [
    ("pydantic_ai", "pydantic_ai", "pydantic-ai-slim"),
    ("openai_agents", "agents", "openai-agents"),
    ("langchain", "langchain_openai", "langchain-openai"),
    ("llama_index", "llama_index", "llama-index-core"),
    ("dspy", "dspy", "dspy"),
    ("litellm", "litellm", "litellm"),
    ("smolagents", "smolagents", "smolagents"),
]


@pytest.mark.parametrize(("module", "imported", "package"), FRAMEWORKS, ids=[name for name, *_ in FRAMEWORKS])
def test_the_error_names_the_package(monkeypatch: pytest.MonkeyPatch, module: str, imported: str, package: str) -> None:
    name = f"aengine.integrations.{module}"
    monkeypatch.delitem(sys.modules, name, raising=False)
    for loaded in [imported, *(other for other in sys.modules if other.startswith(f"{imported}."))]:
        monkeypatch.setitem(sys.modules, loaded, None)
    with pytest.raises(ImportError, match=f"pip install {package} "):
        importlib.import_module(name)
