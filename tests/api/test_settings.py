"""Settings as a user meets them: in `help()`, in the docs, in the environment, as an object."""

from __future__ import annotations

import importlib.util
import inspect
import os
import pydoc
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from aengine import LLM, AsyncLLM, EngineConfig, InvalidRequestError, SamplingParams, StructuredOutput
from aengine.settings import Settings

ROOT = Path(__file__).parents[2]
Make = Callable[..., AsyncLLM]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("settings_script", ROOT / "scripts" / "settings.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


# -- documented


@pytest.mark.parametrize(("name", "file"), [("page", "docs/settings.md"), ("module", "aengine/settings.py")])
def test_what_is_written_from_the_docstrings_is_current(script: ModuleType, name: str, file: str) -> None:
    assert getattr(script, name)() == (ROOT / file).read_text(), f"{file} is stale: run python scripts/settings.py"


@pytest.mark.parametrize("shown_by", [AsyncLLM, LLM, EngineConfig, SamplingParams, StructuredOutput])
def test_help_shows_every_setting_and_what_it_means(script: ModuleType, shown_by: type) -> None:
    text = pydoc.render_doc(shown_by, renderer=pydoc.plaintext)
    cls = shown_by if hasattr(shown_by, "__dataclass_fields__") else EngineConfig
    for field in script.fields_of(cls):
        if field.name != "model":
            assert f"     {field.name}: {field.type} = {field.default}" in text
            assert field.doc.split(".")[0].split(",")[0][:40] in text


def test_editors_know_every_setting() -> None:
    assert set(Settings.__annotations__) == {field.name for field in fields(EngineConfig)} - {"model"}
    for cls in (AsyncLLM, LLM):
        assert list(inspect.signature(cls).parameters.values())[-1].annotation == "Unpack[Settings]"


def test_a_setting_without_a_docstring_or_a_unit_is_found(script: ModuleType) -> None:
    assert all(field.doc for cls in script.CLASSES for field in script.fields_of(cls))
    script.UNITS.pop("num_threads")
    try:
        with pytest.raises(ValueError, match=r"EngineConfig\.num_threads is a number without a unit"):
            script.fields_of(EngineConfig)
    finally:
        script.UNITS["num_threads"] = "threads"


# -- as an object


def test_the_name_of_a_model(tmp_path: Path) -> None:
    folder = tmp_path / "Qwen3-0.6B"
    for model, name in (
        ("smollm2-135m", "smollm2-135m"),
        ("Qwen/Qwen3-0.6B:Q4_K_M", "Qwen/Qwen3-0.6B:Q4_K_M"),
        (str(folder), folder.name),
        ("/", "/"),
    ):
        assert EngineConfig(model=model).model_name == name


def test_adapters_by_name(env: Any) -> None:
    config = EngineConfig(model="m", loras={"a": Path("/x"), "b": "org/y"})
    assert config.loras == {"a": "/x", "b": "org/y"} and config.num_lora_slots == 2
    assert EngineConfig.from_wire(config.to_wire()) == config
    assert EngineConfig(model="m").num_lora_slots == 0
    assert EngineConfig(model="m", loras=dict.fromkeys(map(str, range(40)), "/x")).num_lora_slots == 16
    env(AENGINE_LORAS="a=/x=1, b=org/y")
    assert EngineConfig.from_env(model="m").loras == {"a": "/x=1", "b": "org/y"}
    wrong = ({"loras": ["a"]}, {"loras": {"": "/x"}}, {"loras": {"a": 3}}, {"loras": {"a": "/x"}, "max_loras": 0})
    for settings in (
        *wrong,
        {"max_lora_rank": 8},
        {"max_lora_expert_rank": 8},
        {"max_loras": 2, "batch_invariant": True},
    ):
        with pytest.raises(InvalidRequestError):
            EngineConfig(model="m", **settings)


@pytest.mark.parametrize("name", ["model", "revision", "gguf_file", "tokenizer", "ray_address"])
def test_text_that_no_worker_can_be_sent_is_refused(name: str) -> None:
    path = os.fsdecode(b"/models/m\xffdel.gguf")
    with pytest.raises(InvalidRequestError, match="rename such a file") as caught:
        EngineConfig(**{"model": "smollm2-135m", name: path})
    assert caught.value.param == name
    str(caught.value).encode()  # it can be printed, whatever the value was


@pytest.mark.parametrize(
    ("alone", "needed"),
    [
        ({"kv_cache_scales": "calibrated"}, {"kv_cache_dtype": "fp8"}),
        ({"seed": 5}, {"load_format": "dummy"}),
        ({"ray_address": "auto"}, {"executor": "ray"}),
        ({"tokenizer": "other", "skip_tokenizer": True}, {"skip_tokenizer": False}),
        ({"allow_special_tokens": True, "skip_tokenizer": True}, {"skip_tokenizer": False}),
    ],
    ids=lambda settings: next(iter(settings)),
)
def test_settings_that_need_another_one(alone: dict[str, Any], needed: dict[str, Any]) -> None:
    (name, *_), ((other, value),) = alone, needed.items()
    with pytest.raises(InvalidRequestError, match=f"^{name}=.* no effect without {other}={value!r}: give") as caught:
        EngineConfig(model="m", **alone)
    assert caught.value.param == name
    EngineConfig(model="m", **alone | needed)


def test_an_engine_of_a_configuration() -> None:
    config = EngineConfig(model="smollm2-135m", max_num_seqs=3)
    assert AsyncLLM(config).config is config
    assert AsyncLLM(config, block_size=5).config == EngineConfig(model="smollm2-135m", max_num_seqs=3, block_size=5)
    assert AsyncLLM(config, own_thread=True).sync is not None
    assert AsyncLLM(config.replace(own_thread=True)).sync is not None
    with pytest.raises(InvalidRequestError, match="own_thread=True"):
        _ = AsyncLLM(config).sync
    with pytest.raises(InvalidRequestError, match="did you mean .max_num_seqs"):
        AsyncLLM(config, max_num_seq=5)  # type: ignore[call-arg]
    with pytest.raises(InvalidRequestError, match="max_num_seqs"):
        AsyncLLM(config, max_num_seqs=0)


def test_a_blocking_engine_of_a_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(LLM, "start", lambda self: self)
    config = EngineConfig(model="smollm2-135m", max_num_seqs=3)
    waits = config.replace(own_thread=True, admission="wait")
    assert LLM(config).as_async().config == LLM("smollm2-135m", max_num_seqs=3).as_async().config == waits
    assert LLM(config, admission="error").as_async().config.admission == "error"
    with pytest.raises(InvalidRequestError, match="own_thread"):
        LLM(config, own_thread=False)


# -- from the environment


@pytest.fixture
def env(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    def put(**variables: str) -> None:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)

    return put


def test_settings_of_every_type(env: Callable[..., None]) -> None:
    env(
        AENGINE_MODEL="smollm2-135m",
        AENGINE_REVISION=" main ",
        AENGINE_MAX_NUM_SEQS="64",
        AENGINE_LOGITS_PROCESSORS="a.b:C, thinking_budget",
        AENGINE_MAX_MODEL_LEN="2_048",
        AENGINE_BLOCK_SIZE="none",
        AENGINE_NUM_THREADS="",
        AENGINE_GPU_MEMORY_UTILIZATION="5e-1",
        AENGINE_ENFORCE_EAGER="Yes",
        AENGINE_CUDAGRAPH_MODE="NONE",
        AENGINE_ENABLE_PREFIX_CACHING="0",
        AENGINE_DTYPE="float32",
    )
    expected = EngineConfig(
        model="smollm2-135m",
        revision="main",
        max_num_seqs=64,
        logits_processors=["a.b:C", "thinking_budget"],
        max_model_len=2048,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        cudagraph_mode="NONE",
        enable_prefix_caching=False,
        dtype="float32",
    )
    assert EngineConfig.from_env() == expected
    assert EngineConfig.from_env(model="other", dtype="auto") == expected.replace(model="other", dtype="auto")
    assert AsyncLLM(EngineConfig.from_env(), block_size=3).config.block_size == 3


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"cudagraph_mode": "full"},
            "cudagraph_mode='full' is not valid: it must be one of 'auto', 'FULL', 'PIECEWISE'",
        ),
        ({"cudagraph_mode": None}, "cudagraph_mode=None is not valid"),
        ({"cudagraph_mode": "PIECEWISE", "enforce_eager": True}, "goes against enforce_eager=True: leave one of them"),
        *(
            ({"cudagraph_capture_sizes": wrong}, "cudagraph_capture_sizes=.* a list of 1 to 512 sizes, or None")
            for wrong in ([], "1,2", 8, {1, 2}, list(range(1, 600)))
        ),
        *(
            (
                {"cudagraph_capture_sizes": [4, wrong]},
                f"cudagraph_capture_sizes={wrong!r} .* numbers of requests, each 1",
            )
            for wrong in (0, -1, 2.0, True, None, "8")
        ),
        ({"cudagraph_capture_sizes": [4, 2, 4]}, "cudagraph_capture_sizes=4 is not valid: it must be named once"),
        ({"cudagraph_capture_sizes": [8, 300]}, "sizes=300 .* at most 256, as max_num_seqs is: leave larger ones out"),
        ({"cudagraph_capture_sizes": [513], "max_num_seqs": 1024}, "sizes=513 .* at most 512: larger decodes"),
        (
            {"cudagraph_capture_sizes": [64], "max_num_batched_tokens": 32},
            "sizes=64 .* 32, as max_num_batched_tokens is",
        ),
        ({"cudagraph_capture_sizes": [1], "cudagraph_mode": "NONE"}, "no effect with cudagraph_mode='NONE'"),
        ({"cudagraph_capture_sizes": [1], "enforce_eager": True}, "no effect with enforce_eager=True"),
    ],
)
def test_wrong_settings_of_graphs(settings: dict[str, Any], message: str) -> None:
    """One error, which names the setting and what helps."""
    with pytest.raises(InvalidRequestError, match=message) as caught:
        EngineConfig(model="m", **settings)
    assert caught.value.param in settings


def test_settings_of_graphs() -> None:
    config = EngineConfig(model="m", cudagraph_capture_sizes=[8, 1, 2], cudagraph_mode="PIECEWISE")
    assert (config.cudagraph_capture_sizes, config.graph_mode) == ((1, 2, 8), "PIECEWISE")
    assert EngineConfig.from_wire(config.to_wire()) == config
    assert EngineConfig(model="m").graph_mode == "FULL"
    assert EngineConfig(model="m", enforce_eager=True, cudagraph_mode="NONE").graph_mode == "NONE"


def test_another_prefix(env: Callable[..., None]) -> None:
    env(MYAPP_LLM_SEED="7", AENGINE_SEED="8", MYAPP_PORT="80")
    assert EngineConfig.from_env("MYAPP_LLM_", model="m", load_format="dummy").seed == 7
    with pytest.raises(InvalidRequestError, match="prefix"):
        EngineConfig.from_env("", model="m")


def test_a_model_must_be_named_somewhere() -> None:
    with pytest.raises(InvalidRequestError, match="AENGINE_MODEL is not set"):
        EngineConfig.from_env()


@pytest.mark.parametrize(
    ("variable", "value", "message", "param"),
    [
        (
            "AENGINE_MAX_NUM_SEQ",
            "5",
            "there is no setting 'AENGINE_MAX_NUM_SEQ'; did you mean 'AENGINE_MAX_NUM_SEQS'?",
            None,
        ),
        ("AENGINE_max_num_seqs", "5", "there is no setting 'AENGINE_max_num_seqs'", None),
        (
            "AENGINE_MAX_NUM_SEQS",
            "many",
            "AENGINE_MAX_NUM_SEQS='many' is not valid: it must be an integer",
            "max_num_seqs",
        ),
        ("AENGINE_MAX_NUM_SEQS", "0", "AENGINE_MAX_NUM_SEQS: max_num_seqs=0 is not valid", "max_num_seqs"),
        ("AENGINE_HANG_TIMEOUT", "5 s", "must be a number", "hang_timeout"),
        ("AENGINE_HANG_TIMEOUT", "nan", "AENGINE_HANG_TIMEOUT: ", "hang_timeout"),
        ("AENGINE_CUDAGRAPH_CAPTURE_SIZES", "1,2,many", "integers with commas", "cudagraph_capture_sizes"),
        ("AENGINE_ENFORCE_EAGER", "maybe", "true or false", "enforce_eager"),
        ("AENGINE_DTYPE", "float64", "AENGINE_DTYPE: dtype='float64' is not valid", "dtype"),
        ("AENGINE_SEED", "none", "an integer", "seed"),
        ("AENGINE_LORAS", "folder", "must be name=value", "loras"),
        ("AENGINE_PROGRESS", "print", "a function can't be given in the environment", "progress"),
    ],
)
def test_a_wrong_variable_is_named(env: Any, variable: str, value: str, message: str, param: str | None) -> None:
    env(**{variable: value})
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.from_env(model="m")
    assert message in str(caught.value)
    assert caught.value.param == (param or variable)


@pytest.mark.parametrize("variable", ["AENGINE_FOO", "AENGINE_SEE", "AENGINE_SPECULATIVE_CONFIG", "AENGINE_PORTS"])
def test_what_is_no_slip_of_the_pen_gets_no_suggestion(env: Any, variable: str) -> None:
    env(**{variable: "1"})
    with pytest.raises(InvalidRequestError) as caught:
        EngineConfig.from_env(model="m")
    assert ("did you mean 'AENGINE_SEED'" in str(caught.value)) == (variable == "AENGINE_SEE")


def test_what_kubernetes_sets_for_a_service_is_no_setting(env: Any) -> None:
    """Each pod gets variables with the name of each service, and "aengine" is a likely one."""
    for service in ("", "SERVER_"):
        names = ("SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT", "PORT_8000_TCP", "PORT_8000_TCP_ADDR")
        env(**{f"AENGINE_{service}{name}": "10.0.0.1" for name in names})
    env(AENGINE_SEED="3")
    assert EngineConfig.from_env(model="m", load_format="dummy").seed == 3


def test_a_wrong_argument_is_not_the_environments_fault(env: Callable[..., None]) -> None:
    env(AENGINE_SEED="1")
    with pytest.raises(InvalidRequestError, match="^seed='x'"):
        EngineConfig.from_env(model="m", seed="x")  # type: ignore[arg-type]
