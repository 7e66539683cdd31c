"""The settings of the engine are options of each command that starts one, all but functions and a few."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest

from aengine import AsyncLLM
from aengine.__main__ import build_parser, main
from aengine.cli.engine_options import engine_config, engine_settings
from aengine.config import EngineConfig
from aengine.errors import ModelLoadError

COMMANDS = {"run": ["run", "m", "hello"], "chat": ["chat", "m"], "bench": ["bench", "m"], "serve": ["serve", "m"]}
NO_OPTIONS = {"model", "progress", "on_request_end", "spare_workers", "own_thread", "skip_tokenizer"}


def settings_of(*words: str) -> dict[str, object]:
    return engine_settings(build_parser().parse_args([*words, "--quiet"]))


@pytest.mark.parametrize("command", COMMANDS)
def test_every_setting_is_taken(command: str) -> None:
    words, wanted = list(COMMANDS[command]), {}
    for field in fields(EngineConfig):
        if field.name in NO_OPTIONS or (field.name == "seed" and command in ("run", "chat")):
            continue
        flag, type_name = field.name.replace("_", "-"), EngineConfig.__annotations__[field.name]
        if type_name == "bool":
            words.append(f"--no-{flag}" if field.default else f"--{flag}")
            wanted[field.name] = not field.default
        else:
            kinds = {"int": int, "float": float, "Sequence[str]": lambda text: (text,)}
            kinds["Sequence[int]"] = lambda text: (int(text),)
            kinds["Mapping[str, str]"] = lambda text: {"name": text}
            kind = type_name.removesuffix(" | None")
            words += [f"--{flag}", "name=3" if kind.startswith("Mapping") else "3"]
            wanted[field.name] = kinds.get(kind, str)("3")
    assert len(wanted) > 40
    assert settings_of(*words) == wanted
    assert settings_of(*COMMANDS[command]) == {}, "the engine's own defaults"


def test_none_is_a_value() -> None:
    words = ["--unread-timeout", "none", "--max-step-seconds", "none"]
    assert settings_of(*COMMANDS["run"], *words) == {"unread_timeout": None, "max_step_seconds": None}


def test_adapters_may_be_named_one_by_one(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*COMMANDS["serve"], "--lora", "a=x,y=z", "--loras", "b=1,c=2", "--lora", "d=e"]
    assert settings_of(*words) == {"loras": {"a": "x,y=z", "b": "1", "c": "2", "d": "e"}}
    for wrong in ("a=2", "name", "=x", "x="):
        with pytest.raises(SystemExit):
            settings_of(*words, "--lora", wrong)
        assert "--lora" in capsys.readouterr().err


def test_a_seed_is_that_of_the_sampling() -> None:
    args = build_parser().parse_args([*COMMANDS["run"], "--seed", "7"])
    assert args.seed == 7 and "seed" not in engine_settings(args)
    assert settings_of(*COMMANDS["serve"], "--seed", "7") == {"seed": 7}


def test_values_are_checked(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        build_parser().parse_args([*COMMANDS["run"], "--tensor-parallel-size", "two"])
    assert "--tensor-parallel-size" in (shown := capsys.readouterr().err) and "'two'" in shown
    assert len(shown.splitlines()) == 1, "not below a page of all options"
    settings = settings_of(*COMMANDS["run"], "--dtype", "int4")
    with pytest.raises(ValueError, match="dtype='int4' is not valid"):
        AsyncLLM("smollm2-135m", **settings)  # type: ignore[arg-type]


def test_a_short_help_says_where_the_rest_is(capsys: pytest.CaptureFixture[str]) -> None:
    shown = {}
    for command in ("run", "serve"):
        with pytest.raises(SystemExit):
            build_parser().parse_args([command, "--help"])
        shown[command] = capsys.readouterr().out
    assert "--ring-bytes" not in shown["run"] and "aengine serve --help lists them" in shown["run"]
    assert "--ring-bytes VALUE" in shown["serve"]


@pytest.mark.parametrize("command", COMMANDS)
def test_the_environment_is_read_too(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And what the command line says comes before it."""
    given = {"MAX_MODEL_LEN": "512", "MAX_NUM_SEQS": "7", "MODEL": "other", "API_KEY": "secret"}
    for name, value in given.items():
        monkeypatch.setenv(f"AENGINE_{name}", value)
    config = engine_config(build_parser().parse_args([*COMMANDS[command], "--max-num-seqs", "9", "--quiet"]))
    assert (config.model, config.max_model_len, config.max_num_seqs) == ("m", 512, 9)
    monkeypatch.setenv("AENGINE_MAX_MODEL_LEN", "many")
    with pytest.raises(ValueError, match="AENGINE_MAX_MODEL_LEN='many' is not valid"):
        engine_config(build_parser().parse_args(COMMANDS[command]))


@pytest.mark.parametrize("command", COMMANDS)
def test_options_are_written_out(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    for words in (["--max-num-seq", "3"], ["--dtyp", "auto"], ["--ver"]):
        with pytest.raises(SystemExit):
            build_parser().parse_args([*COMMANDS[command], *words])
        assert f"unrecognized arguments: {' '.join(words)}" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "word", "near"),
    [
        ("run", "--max-token", "--max-tokens"),
        ("serve", "--max-num-seq=3", "--max-num-seqs"),
        ("chat", "--sytem", "--system"),
    ],
)
def test_a_slip_of_the_pen_is_told_what_was_meant(
    command: str, word: str, near: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        build_parser().parse_args([*COMMANDS[command], word])
    assert caught.value.code == 2 and f"{word}; did you mean {near}? (" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        build_parser().parse_args([*COMMANDS[command], "--nothing-of-the-kind"])
    assert "did you mean" not in capsys.readouterr().err


@pytest.mark.parametrize("command", COMMANDS)
def test_each_command_takes_the_settings_and_says_2_for_a_wrong_one(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And a model that is not there is 1."""
    found: list[EngineConfig] = []

    def note(config: EngineConfig) -> None:
        found.append(config)
        raise ModelLoadError("there is none")

    monkeypatch.setattr("aengine.server.logs.log_to_stderr", lambda *_, **__: None)
    monkeypatch.setenv("AENGINE_MAX_MODEL_LEN", "512")
    assert main([*COMMANDS[command], "--dtype", "int4"]) == 2
    assert "dtype='int4' is not valid" in capsys.readouterr().err
    monkeypatch.setattr(f"aengine.cli.{command}.AsyncLLM", note)
    assert main([*COMMANDS[command], "--max-num-seqs", "9"]) == 1
    assert [(config.max_model_len, config.max_num_seqs) for config in found] == [(512, 9)]


def test_models_in_a_file_have_settings_of_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good, bad = tmp_path / "good.toml", tmp_path / "bad.toml"
    good.write_text('[a]\nmodel = "m"\nmax_num_seqs = 3\nloras = {x = "y"}\n["b/c"]\nmodel = "n"\nsleep_after = 60\n')
    found: list[EngineConfig] = []
    monkeypatch.setattr("aengine.server.logs.log_to_stderr", lambda *_, **__: None)
    monkeypatch.setattr("aengine.cli.serve.AsyncLLM", found.append)
    monkeypatch.setattr("aengine.cli.serve._trace", lambda *_: None)
    wrongs = {
        "": "can't be read",
        "[a": "bad.toml can't be read: ",
        "a = 1": "[a] must be a table with model =",
        "[b]\nmax_num_seqs = 4": "[b] must be a table with model =",
        '[b]\nmodel = "m"\nmax_num_seqz = 4': "[b]: there is no such setting in a file: max_num_seqz",
        '[b]\nmodel = "m"\nown_thread = true': "[b]: there is no such setting in a file: own_thread",
        '[b]\nmodel = "m"\nmax_num_seqs = "4"': "[b]: max_num_seqs='4' is not valid",
        "[b]\nmodel = 3": "[b]: model=3 is not valid",
        '[a]\nmodel = "m"': "two models have the name 'a'",
    }
    for text, says in wrongs.items():
        if text:
            bad.write_text(text)
        assert main(["serve", str(good), str(bad), "--max-num-seqs", "9"]) == 2
        assert says in capsys.readouterr().err, text
    assert main(["serve", str(good), "--workers", "2"]) == 2
    assert [(one.model, one.max_num_seqs, one.sleep_after, one.loras) for one in found[:2]] == [
        ("m", 3, None, {"x": "y"}),
        ("n", 9, 60, {}),
    ]
