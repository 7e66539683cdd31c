"""Integrations whose framework is not installed, or that get no engine."""

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
    ("lm_eval", "lm_eval", "lm-eval"),
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


@pytest.mark.parametrize(
    ("module", "name"),
    [
        ("dspy", "lm"),
        ("langchain", "ChatAEngine"),
        ("llama_index", "AEngine"),
        ("llama_index", "AEngineEmbedding"),
        ("openai_agents", "AEngineModel"),
        ("pydantic_ai", "AEngineModel"),
        ("smolagents", "AEngineModel"),
    ],
)
def test_the_name_of_a_model_is_no_engine(module: str, name: str) -> None:
    with pytest.raises(ValueError, match="engine must be an AsyncLLM or an LLM, not 'smollm2-135m'"):
        getattr(importlib.import_module(f"aengine.integrations.{module}"), name)(engine="smollm2-135m")
