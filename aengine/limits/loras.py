"""The setting ``loras``: adapters by name."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike, fspath

from ..errors import InvalidRequestError
from .values import is_unicode, not_valid

MAX_NAMED_LORAS = 10_000
DEFAULT_RANK = 16
"""The largest rank of an adapter, where neither the settings nor their adapters say it."""
MOST_CHARACTERS = 256  # a name has


def is_lora_name(name: object) -> bool:
    return isinstance(name, str) and 0 < len(name) <= MOST_CHARACTERS and is_unicode(name)


def checked_loras(given: object, max_loras: int | None, ranks: Mapping[str, int | None]) -> dict[str, str]:
    """Return the setting as a mapping of names to sources. ``ranks``: names and values of the settings that need
    adapters. Raises InvalidRequestError: it is none, or has no effect beside the others, or one of them without it."""
    if given is not None and (not isinstance(given, Mapping) or len(given) > MAX_NAMED_LORAS):
        raise not_valid("loras", given, f"a mapping of at most {MAX_NAMED_LORAS} names to folders or hub ids")
    loras: dict[str, str] = {}
    for name, source in (given or {}).items():
        if not is_lora_name(name):
            raise not_valid("loras", name, f"a mapping whose names are texts of 1 to {MOST_CHARACTERS} characters")
        source = fspath(source) if isinstance(source, PathLike) else source
        if not isinstance(source, str) or not source or not is_unicode(source):
            raise not_valid("loras", source, f"a folder or a hub id for {name!r}")
        loras[name] = source
    if loras and max_loras == 0:
        raise InvalidRequestError("max_loras=0 leaves no place for loras: raise it, or leave one out", param="loras")
    for name, rank in ranks.items():
        if rank is not None and not (loras or max_loras):
            raise not_valid(name, rank, "left out without adapters (loras or max_loras)")
    return loras
