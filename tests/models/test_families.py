"""`aengine.cli.families` says what the registries, the formats of chats, the tests and docs/models.md say."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest
import test_hybrids
import test_scenarios
import test_text_models
from gguf import MODEL_ARCH_NAMES
from test_gguf_weights import ARCHS
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from aengine.__main__ import main
from aengine.cli.families import FAMILIES, Family
from aengine.engine.chat.formats import FORMATS, HARMONY
from aengine.errors import ModelLoadError
from aengine.runner import models
from aengine.runner.models.encoders import ENCODERS

ROOT = Path(__file__).resolve().parents[2]
DECODERS = [family for family in FAMILIES if family.task == "generate" and family.path == "native"]


def test_the_registries_are_listed() -> None:
    assert sorted(kind for family in DECODERS for kind in family.model_types) == sorted(models.FAMILIES)
    encoders = [kind for family in FAMILIES if family.task == "embed" for kind in family.model_types]
    assert sorted(encoders) == sorted(ENCODERS)


@pytest.mark.parametrize("family", DECODERS, ids=lambda family: family.model_types[0])
def test_what_is_said_of_a_family(family: Family) -> None:
    assert set(family.tools) <= {*FORMATS, HARMONY.name}
    known = {*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values(), *MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    assert set(family.classes) <= known
    for kind in family.model_types:
        assert MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.get(kind, family.classes[0]) in family.classes
    assert ("gguf" in family.formats) == bool(family.gguf)
    for arch in family.gguf:
        assert models.GGUF_ARCHITECTURES[arch] in models.FAMILIES
    tested = {MODEL_ARCH_NAMES[ARCHS[kind]] for kind in family.model_types if kind in ARCHS}
    assert tested <= set(family.gguf) and bool(tested) == bool(family.gguf)


def test_gguf_files_of_other_architectures_are_refused_by_name() -> None:
    """Before a tensor is looked for, also where the architecture has the name of a native family."""
    listed = {arch for family in DECODERS for arch in family.gguf}
    assert listed == set(models.GGUF_ARCHITECTURES)
    for arch in {*MODEL_ARCH_NAMES.values(), *models.FAMILIES} - listed:
        with pytest.raises(ModelLoadError, match=f"'{arch}' are not read: .*give the folder or hub id"):
            models.read_config({"model_type": arch, "gguf_architecture": arch})


def test_every_scenario_is_every_scenario() -> None:
    """Each native decoder has a test that compares all of its tokens with transformers'."""
    kinds = {kind for kind, _ in (*test_scenarios.MODELS.values(), *test_hybrids.MODELS.values())}
    kinds |= {"phi3", *test_text_models.MISTRAL3, "mimo"}  # tests/e2e/test_trained_heads.py compares it with Qwen 2
    kinds |= {"kimi_k2"}  # test_model_config.py compares it with deepseek_v3
    for family in DECODERS:
        assert ("every scenario" in family.tested) == (not kinds.isdisjoint(family.model_types)), family.name
        assert len(set(family.model_types) - kinds) == 0 or family.name == "Gemma 3"  # of which one is the other's


def test_the_page_has_the_table() -> None:
    spec = importlib.util.spec_from_file_location("families_script", ROOT / "scripts" / "families.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    assert script.table() in (ROOT / "docs/models.md").read_text(), "stale: run python scripts/families.py"


def test_the_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["models", "--json"]) == 0
    listed = {entry["name"]: entry for entry in json.loads(capsys.readouterr().out)}
    assert listed["gpt-oss"]["model_types"] == ["gpt_oss"] and listed["gpt-oss"]["tools"] == ["harmony"]
    assert main(["models"]) == 0
    text = capsys.readouterr().out
    for family in FAMILIES:
        assert family.name in text and ", ".join(family.formats) in text


def test_torch_is_not_imported() -> None:
    program = "import sys; from aengine.__main__ import main; main(['models']); sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, stdout=subprocess.DEVNULL)
