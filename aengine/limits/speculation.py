"""The setting ``speculation``: a method's name, or a method with more about it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from json import dumps, loads
from os import PathLike, fspath
from typing import Any, NamedTuple

from .values import not_valid


class SpeculationSettings(NamedTuple):
    """The setting ``speculation``, read."""

    method: str
    model: str = ""  # what a method that has weights loads; "": the method has none
    tokens: int = 4  # most guesses of a request in a step, where the worker makes them by a model

    @classmethod
    def of(cls, text: str) -> SpeculationSettings:
        """Read what `checked_speculation` returned."""
        return cls(**loads(text)) if text.startswith("{") else cls(text)


NEEDS_MODEL = {"draft_model": True, "eagle3": True, "peagle": True, "dflash": True, "mtp": False}
"""Methods with weights, in the worker: whether they need a model apart, or may be in the model's own checkpoint."""


def checked_speculation(given: object, find: Callable[[str], str | None], names: Callable[[], Iterable[str]]) -> str:
    """Return the setting as a text: a method's name, or more about it in JSON. ``find``: returns None for what is no
    method; ``names``: of all methods. Raises InvalidRequestError."""
    try:
        given = loads(given) if isinstance(given, str) and given.startswith("{") else given
    except (ValueError, RecursionError) as error:
        raise not_valid("speculation", given, f"JSON of settings: {error}") from None
    how: dict[str, Any] = dict(given) if isinstance(given, Mapping) else {"method": "none" if given is None else given}
    if "num_speculative_tokens" in how and "tokens" not in how:
        how["tokens"] = how.pop("num_speculative_tokens")
    if isinstance(how.get("model"), PathLike):
        how["model"] = fspath(how["model"])
    name = how.get("method")
    if isinstance(name, str) and name in ("eagle3", "peagle") and "parallel_drafting" in how:
        if name != "eagle3" or how.pop("parallel_drafting") is not True:
            wanted = 'settings whose parallel_drafting is true, beside "eagle3", or without it'
            raise not_valid("speculation", given, wanted)
        name = how["method"] = "peagle"
    if {"tokens", "num_speculative_tokens"} <= set(how):
        raise not_valid("speculation", given, "settings of tokens or num_speculative_tokens, which is the same")
    if not isinstance(name, str) or (name != "none" and find(name) is None):
        known = ("none", *names())
        raise not_valid("speculation", given, f"one of {', '.join(map(repr, known))}, or settings with a method")
    if (unknown := set(how) - set(SpeculationSettings._fields)) or not isinstance(how.get("model", ""), str):
        wanted = f"settings of {', '.join(SpeculationSettings._fields)}, not {', '.join(map(repr, unknown))}"
        raise not_valid("speculation", given, wanted if unknown else "settings whose model is a text")
    if name == "none":
        return name
    needs_model = NEEDS_MODEL.get(name, False)
    if bool(how.get("model")) != needs_model and (needs_model or name not in NEEDS_MODEL):
        wanted = f'{{"method": "{name}", "model": PATH}}' if needs_model else "settings without a model"
        raise not_valid("speculation", given, wanted)
    if "tokens" in how and name not in NEEDS_MODEL:
        raise not_valid("speculation", given, f"settings without tokens: {name!r} drafts as many as pay")
    if isinstance(tokens := how.get("tokens", 4), bool) or not isinstance(tokens, int) or not 1 <= tokens <= 16:
        raise not_valid("speculation", given, "settings whose tokens are 1 to 16")
    return name if set(how) == {"method"} else dumps(how)
