"""The tables of docs/openai.md: current, complete, and true."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

import openai
import pytest

from aengine.testing import FakeAsyncLLM

ROOT = Path(__file__).resolve().parents[2]
PATHS: dict[str, tuple[str, dict[str, Any]]] = {
    "Chat completions": ("/chat/completions", {"messages": [{"role": "user", "content": "hello"}]}),
    "Completions": ("/completions", {"prompt": "hello"}),
    "Responses": ("/responses", {"input": "hello"}),
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("openai_fields", ROOT / "scripts" / "openai_fields.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_current(script: ModuleType) -> None:
    written = (ROOT / "docs" / "openai.md").read_text()
    assert written == script.page(), "it is stale: run python scripts/openai_fields.py"
    for interface in script.INTERFACES:
        notes = script.NOTES[interface.body.__name__].keys()
        assert notes <= script.treatments(interface.body).keys(), "a note about a field that is not there"


@pytest.mark.parametrize("title", PATHS)
async def test_fields_are_treated_as_the_tables_say(script: ModuleType, title: str) -> None:
    (interface,) = [one for one in script.INTERFACES if one.title == title]
    path, body = PATHS[title]
    async with FakeAsyncLLM("yes") as engine, engine.openai_client(max_retries=0) as client:
        treatments = script.treatments(interface.body)
        assert set(treatments.values()) == {"honoured", "ignored", "refused"}
        for name, treatment in treatments.items():
            if treatment == "ignored":
                await client.post(path, body=body | {name: {"any": ["thing"]}}, cast_to=object)
            elif treatment == "refused":
                await client.post(path, body=body | {name: None}, cast_to=object)
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.post(path, body=body | {name: {"any": ["thing"]}}, cast_to=object)
                assert (caught.value.param, caught.value.code) == (name, "unsupported_parameter")
