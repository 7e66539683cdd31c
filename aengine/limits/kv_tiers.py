"""The setting ``kv_tiers``: where KV is kept that the device has no room for, nearest first."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from ..errors import InvalidRequestError
from .registry import KV_STORES, check_target
from .values import is_unicode, not_valid

MAX_TIERS = 8
_MOST_BYTES = 1 << 60
_UNITS = (
    {"": 1, "B": 1}
    | {f"{x}B": 1000**i for i, x in enumerate("KMGT", 1)}
    | {f"{x}iB": 1024**i for i, x in enumerate("KMGT", 1)}
)
_FORMS = "'host:SIZE', 'disk:PATH:SIZE' or 'NAME:option=value;option=value', with commas between them"


@dataclass(frozen=True)
class HostTier:
    """The host's memory, pinned where there is a GPU. ``size``: bytes of all ranks together, or a text: "40GB",
    "1.5GiB"."""

    size: int | str

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", _checked_size(self.size, "HostTier"))

    @property
    def num_bytes(self) -> int:
        return int(self.size)


@dataclass(frozen=True)
class DiskTier:
    """A folder of files, which survive the process. ``path``: a folder of this user's alone (mode 0700); it is made if
    there is none. ``size``: bytes that the files have at most, or a text: "200GB", "1.5TiB"."""

    path: str | os.PathLike[str]
    size: int | str

    def __post_init__(self) -> None:
        path = os.fspath(self.path) if isinstance(self.path, os.PathLike) else self.path
        if not isinstance(path, str) or not path.strip() or "\0" in path or not is_unicode(path):
            raise _wrong(self.path, "a DiskTier whose path is a folder's")
        path = os.path.expanduser(path)
        absolute = path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
        object.__setattr__(self, "path", os.path.normpath(absolute))
        object.__setattr__(self, "size", _checked_size(self.size, "DiskTier"))

    @property
    def num_bytes(self) -> int:
        return int(self.size)


@dataclass(frozen=True, init=False, repr=False)
class StoreTier:
    """A store that several engines may share: a `KVStore`, by its name in the group "aengine.kv_stores" ("redis"), or
    as "module:Class", and what it is made with."""

    name: str
    options: Mapping[str, Any]

    def __init__(self, name: str, /, **options: Any) -> None:
        for key, value in options.items():
            if not isinstance(value, str | int | float | None) or not is_unicode(str(value)):
                raise _wrong(key, f"a StoreTier whose options are texts, numbers or None, and {key!r} is none")
        object.__setattr__(self, "name", name)
        object.__setattr__(self, "options", options)

    def __repr__(self) -> str:
        """Return it without passwords: settings are logged, and shown in messages."""
        shown = {
            key: _without_password(repr(own)) if key == "url" or not isinstance(own, str) else "..."
            for key, own in self.options.items()
        }
        said = [f"{key}={own}" for key, own in shown.items()]
        return f"StoreTier({', '.join([repr(self.name), *said])})"


KVTier = HostTier | DiskTier | StoreTier


def checked_kv_tiers(given: object, *, caches_prefixes: bool) -> tuple[KVTier, ...]:
    """Return the setting as tiers. ``caches_prefixes``: the setting without which no tier has an effect. Blocking where
    a store is another package's: reads files. Raises InvalidRequestError."""
    if isinstance(given, str):
        given = [_of_text(part.strip()) for part in given.split(",") if part.strip()]
    if not isinstance(given, Sequence) or len(given) > MAX_TIERS:
        raise _wrong(given, f"a list of at most {MAX_TIERS} tiers, or a text: {_FORMS}")
    tiers = tuple(map(_of_plain_data, given))
    if not tiers:
        return tiers
    if not caches_prefixes:
        raise _refused("kv_tiers has no effect without enable_prefix_caching=True: give that, too, or leave it out")
    if not isinstance(tiers[0], HostTier):
        raise _refused(
            f"kv_tiers must begin with a HostTier, through which all pages pass: HostTier('1GB'), {tiers[0]}"
        )
    if any(isinstance(tier, HostTier) for tier in tiers[1:]):
        raise _refused("kv_tiers has several HostTiers: give one, of all their bytes")
    places = [tier.path if isinstance(tier, DiskTier) else repr(tier) for tier in tiers]
    for place in places:
        if places.count(place) > 1:
            raise _refused(f"kv_tiers has {place} twice: leave one of them out")
    for tier in tiers:
        if isinstance(tier, StoreTier):
            check_target("kv_tiers", tier.name, KV_STORES, "module:Class")
    return tiers


def _of_plain_data(given: object) -> KVTier:
    """Return a tier, or one as it comes to a worker."""
    if isinstance(given, HostTier | DiskTier | StoreTier):
        return given
    if isinstance(given, Mapping):
        if given.keys() == {"name", "options"}:
            return StoreTier(given["name"], **given["options"])
        for cls in (HostTier, DiskTier):
            if given.keys() == {field.name for field in fields(cls)}:
                return cls(**given)
    raise _wrong(given, "a list of HostTier(size), DiskTier(path, size) and StoreTier(name, ...)")


def _of_text(part: str) -> KVTier:
    name, _, rest = part.partition(":")
    if name == "host":
        return HostTier(rest)
    if name == "disk":
        path, separator, size = rest.rpartition(":")
        if not separator:
            raise _wrong(part, _FORMS)
        return DiskTier(path, size)
    store = re.fullmatch(r"([\w.-]+(?::\w+)?)(?::(.*))?", part)
    if store is None:
        raise _wrong(part, _FORMS)
    options = {}
    for option in filter(None, (store[2] or "").split(";")):
        key, separator, value = option.partition("=")
        if not separator or not key.isidentifier():
            raise _wrong(part, _FORMS)
        options[key] = _number(value)
    return StoreTier(store[1], **options)


def _number(text: str) -> str | int | float:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text


def _checked_size(size: object, tier: str) -> int:
    """Return the bytes. Raises InvalidRequestError."""
    number: object = size
    if isinstance(size, str) and (
        match := re.fullmatch(r"([0-9]{1,18}(?:\.[0-9]{1,9})?) ?([KMGT]?i?B?)", size.strip(), re.I)
    ):
        unit = next((value for name, value in _UNITS.items() if name.lower() == match[2].lower()), 0)
        number = int(float(match[1]) * unit)
    if isinstance(number, bool) or not isinstance(number, int) or not 0 < number <= _MOST_BYTES:
        raise _wrong(size, f"a {tier} whose size is a number of bytes above 0, or a text as '40GB' or '1.5GiB'")
    return number


def _without_password(text: str) -> str:
    return re.sub(r"\?[^\s,;'\"]+=[^\s,;'\"]*", "?...", re.sub(r"//[^/\s]*@", "//...@", text))


def _wrong(given: object, wanted: str) -> InvalidRequestError:
    error = not_valid("kv_tiers", given, wanted)
    return InvalidRequestError(_without_password(str(error)), param=error.param)


def _refused(message: str) -> InvalidRequestError:
    return InvalidRequestError(message, param="kv_tiers")
