"""The setting ``tenants``: what each of those who ask may have of the engine."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidRequestError
from .bounds import MAX_NAME_CHARACTERS, MAX_TENANTS
from .values import is_unicode, not_valid, unknown_name

OTHERS = "*"
"""The name of what tenants have that the setting does not name, each of them."""
_MOST_BYTES = 4 << 20  # a file of settings has
_LARGEST_WEIGHT = 1000.0


@dataclass(frozen=True, kw_only=True)
class Tenant:
    """What a tenant may have of the engine.

    ``weight``: its share beside others', 0.001 to 1000. ``max_running``: requests with a row at once; the rest wait,
    and others go past. ``max_waiting``: requests that wait. ``tokens_per_minute``: of prompts and completions together.
    None: no limit of its own. What comes over ``max_waiting`` or ``tokens_per_minute`` is refused or waits, as the
    setting ``admission`` says.
    """

    weight: float = 1.0
    max_running: int | None = None
    max_waiting: int | None = None
    tokens_per_minute: int | None = None

    def __post_init__(self) -> None:
        weight = self.weight
        is_number = isinstance(weight, int | float) and not isinstance(weight, bool)
        if not is_number or not 1 / _LARGEST_WEIGHT <= weight <= _LARGEST_WEIGHT:
            raise not_valid("weight", weight, "a number from 0.001 to 1000")
        for name in ("max_running", "max_waiting", "tokens_per_minute"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 2**53):
                raise not_valid(name, value, "an integer >= 1, or None")


_NAMES = {field.name for field in fields(Tenant)}


def checked_tenants(given: object) -> dict[str, Tenant]:
    """Return the setting as tenants by name; of a file, its tables under ``tenants``. Blocking: reads it. Raises
    InvalidRequestError."""
    if isinstance(given, str | os.PathLike):
        given = read_toml(given).get("tenants", {})
    if given is not None and (not isinstance(given, Mapping) or len(given) > MAX_TENANTS):
        raise not_valid("tenants", given, f"a mapping of at most {MAX_TENANTS} names to Tenants, or a file of them")
    return {_checked_name(name): _checked_tenant(name, one) for name, one in (given or {}).items()}


def _checked_name(name: object) -> str:
    if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME_CHARACTERS or not is_unicode(name):
        raise not_valid("tenants", name, f"a mapping whose names are texts of 1 to {MAX_NAME_CHARACTERS} characters")
    return name


def _checked_tenant(name: str, given: object) -> Tenant:
    if isinstance(given, Tenant):
        return given
    if not isinstance(given, Mapping):
        raise not_valid("tenants", given, f"a Tenant for {name!r}")
    for key in given:
        if key not in _NAMES:
            raise InvalidRequestError(f"tenants: {name!r}: {unknown_name(str(key), _NAMES)}", param="tenants")
    try:
        return Tenant(**given)
    except InvalidRequestError as error:
        raise InvalidRequestError(f"tenants: {name!r}: {error}", param="tenants") from None


def read_toml(path: str | os.PathLike[str], param: str = "tenants") -> dict[str, Any]:
    """Read a file of settings. Blocking. Raises InvalidRequestError, which shows nothing of what is in it."""
    import tomllib

    place = os.path.abspath(os.path.expanduser(os.fspath(path)))
    try:
        with open(place, "rb") as file:
            content = file.read(_MOST_BYTES + 1)
        if len(content) > _MOST_BYTES:
            raise ValueError(f"it has over {_MOST_BYTES >> 20} MiB")
        return tomllib.loads(content.decode())
    except (OSError, ValueError) as error:  # errors of TOML and of UTF-8 are ValueErrors
        cause = error.strerror if isinstance(error, OSError) else type(error).__name__
        where = str(error).rpartition("(at ")[2].rstrip(")") if isinstance(error, tomllib.TOMLDecodeError) else ""
        message = f"{param}: the file {place!r} can't be read as TOML: {cause}{where and f' at {where}'}"
        raise InvalidRequestError(message, param=param) from None
