"""The engine's settings as options of the commands that start one, such as ``--max-num-seqs 64``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from dataclasses import fields
from typing import Any

from ..config import EngineConfig
from ..errors import InvalidRequestError
from ..settings import value_of
from .progress import StartupLine

_FIRST = {
    "dtype": "float32, bfloat16 or float16 (auto)",
    "device": "auto, cpu, cuda, cuda:N, or one for each rank: cuda:0,1 (auto)",
    "max_model_len": "tokens of prompt and completion together",
    "num_threads": "CPU threads of each worker",
    "load_format": "safetensors, gguf or dummy (auto)",
    "trust_remote_code": "run Python code that lies beside the weights",
}
"""What most users look for, with its help."""
NOT_HERE = {"model", "progress", "on_request_end", "spare_workers", "own_thread", "skip_tokenizer"}
"""What the commands set themselves, or what is a function."""
_PREFIX = "engine_"  # prefix of the settings' names in the parsed arguments, since `seed` is also a sampling parameter


def add_engine_options(command: argparse.ArgumentParser, *, shows_all: bool = False, but: str = "") -> None:
    """Add an option for each setting but for functions and those that are the command's own.

    ``shows_all``: the help has all of them, not only those that most users look for; ``but``: the setting whose option
    means something else in this command.
    """
    group = command.add_argument_group("engine")
    for name, text in _FIRST.items():
        _add(group, name, text)
    group.add_argument("-v", "--verbose", action="store_true", help="log to stderr")
    group.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    shown = "what each does: https://github.com/aengine/aengine/blob/main/docs/settings.md"
    hidden = "any setting is an option, as --tensor-parallel-size 2; aengine serve --help lists them"
    more = command.add_argument_group("more settings of the engine", shown if shows_all else hidden)
    for field in fields(EngineConfig):
        if field.name not in {*_FIRST, *NOT_HERE, but}:
            _add(more, field.name, f"({field.default})" if shows_all else argparse.SUPPRESS)
    text = "an adapter of loras; may be repeated" if shows_all else argparse.SUPPRESS
    one: dict[str, Any] = {"dest": f"{_PREFIX}loras", "default": argparse.SUPPRESS, "help": text, "action": _Merged}
    more.add_argument("--lora", type=_named, metavar="NAME=PATH", **one)


class _Merged(argparse.Action):
    """Adds names to the mapping that options before this one gave."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option: Any = None) -> None:
        before = getattr(namespace, self.dest, None) or {}
        if twice := sorted(before.keys() & (values or {}).keys()):
            raise argparse.ArgumentError(self, f"{twice[0]!r:.80} is named twice")
        setattr(namespace, self.dest, before | dict(values or {}))


def _named(text: str) -> dict[str, str]:
    name, separator, value = text.partition("=")
    if not (name and separator and value):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=PATH")
    return {name: value}


def _add(group: Any, name: str, text: str) -> None:
    flag, type_name = f"--{name.replace('_', '-')}", EngineConfig.__annotations__[name]
    # SUPPRESS, since None is a value of some settings
    where: dict[str, Any] = {"dest": _PREFIX + name, "default": argparse.SUPPRESS, "help": text}
    if type_name == "bool":
        group.add_argument(flag, action=argparse.BooleanOptionalAction, **where)
        return
    if type_name.startswith("Mapping["):
        where["action"] = _Merged

    def parsed(given: str) -> Any:
        try:
            return value_of(flag, name, type_name, given)
        except InvalidRequestError as error:
            raise argparse.ArgumentTypeError(str(error)) from None

    group.add_argument(flag, type=parsed, metavar="VALUE", **where)


def engine_settings(args: argparse.Namespace) -> dict[str, Any]:
    """Return the settings that the command line gives, and the progress on stderr."""
    given = {name.removeprefix(_PREFIX): value for name, value in vars(args).items() if name.startswith(_PREFIX)}
    return given if args.quiet else {**given, "progress": StartupLine()}


def engine_config(args: argparse.Namespace, model: str | None = None, **own: Any) -> EngineConfig:
    """Return the settings of the environment, replaced by those of the command line and then by its ``own``, for
    ``model`` or the command's. Raises InvalidRequestError."""
    return EngineConfig.from_env(model=model or args.model, **engine_settings(args) | own)


def whole_number(wanted: str, low: int, high: int | None = None) -> Callable[[str], int]:
    """Return the type of an option whose value is from ``low`` to ``high``; ``wanted`` says so in its error."""

    def number(text: str) -> int:
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {wanted}")
        return int(text)

    return number
