"""`ValueReader`: the values in a model's files, each checked before it is believed. Those files come from anywhere.

A number is finite and within bounds, a count no larger than any model's, a text is text; whatever else is written
raises a ModelLoadError that names the file and the key. `read_json` reads such a file, and `damage_explained` makes
the same error of whatever is found to be wrong later, where a file's values are used.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ..errors import AEngineError, ModelLoadError

logger = logging.getLogger("aengine.checkpoint")

_MOST_BYTES = 1 << 26
"""Of a file that is read whole. The largest are tokenizers, of 33 MB, and the indices of split checkpoints, of 20."""
_MOST_DEPTH = 64
_MOST_NAME = 100
_MOST = (1 << 31) - 1
"""Of an integer that has no bound of its own: ids, positions and sizes are 32-bit integers on a device."""
_MOST_OF = {
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "num_local_experts": 1 << 14,
    "num_experts": 1 << 14,
    "num_labels": 1 << 20,
    "num_layers": 1 << 12,
    "n_layers": 1 << 12,
    "n_layer": 1 << 12,
    "block_count": 1 << 12,
    "head_count": 1 << 16,
    "head_count_kv": 1 << 16,
    "expert_count": 1 << 14,
}
"""Bounds of counts, in config.json and by the last part of GGUF's keys, whose layers, heads, experts and labels are
made one by one. No model has a tenth of them."""


class ValueReader:
    """The values of a mapping that was read from ``where``, a file or a place in one. A null is as good as no value.

    Every method but `raw` raises ModelLoadError, naming file and key, for a value that is not of its kind.
    """

    def __init__(self, values: Mapping[str, Any], where: str = "config.json") -> None:
        self._values = values
        self._where = where

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def error(self, key: str, problem: str) -> ModelLoadError:
        """Return the error that says what is wrong with the value of ``key``."""
        return ModelLoadError(f"{self._where}: {key:.80}={self.raw(key)!r:.80} {problem}")

    def raw(self, key: str) -> Any:
        """Return the value without a check of its type; None: there is no such key."""
        return self._values.get(key)

    def integer(self, key: str, default: int | None = None, *, least: int = 1, most: int | None = None) -> int:
        """Return an integer from ``least`` to ``most``, or to what such a count can be; without a default the key must
        be there."""
        found = self.integer_or_none(key, least=least, most=most)
        if found is not None:
            return found
        if default is None:
            raise self.missing(key)
        return default

    def integer_or_none(self, key: str, *, least: int = 1, most: int | None = None) -> int | None:
        """Return an integer as `integer` does; None: the key is not there, or null."""
        value, most = self.raw(key), most or _MOST_OF.get(key.rpartition(".")[2], _MOST)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int) or not least <= value:
            raise self.error(key, f"must be an integer >= {least}")
        if value > most:
            raise self.error(key, f"is more than any model has: {most} at most")
        return value

    def number(
        self, key: str, default: float | None = None, *, above: float = -math.inf, least: float = -math.inf
    ) -> float:
        """Return a finite number, larger than ``above``, from ``least`` on; without a default the key must be there."""
        found = self.number_or_none(key, above=above, least=least)
        if found is not None:
            return found
        if default is None:
            raise self.missing(key)
        return default

    def number_or_none(self, key: str, *, above: float = -math.inf, least: float = -math.inf) -> float | None:
        """Return a number as `number` does; None: the key is not there, or null."""
        value = self.raw(key)
        if value is None:
            return None
        number = _finite(value)
        if number is None or number <= above or number < least:
            bound = f" above {above:g}" if above > -math.inf else f" >= {least:g}" if least > -math.inf else ""
            raise self.error(key, f"must be a finite number{bound}")
        return number

    def numbers(self, key: str) -> list[float]:
        """Return a list of finite numbers; [] where there is none."""
        found = [_finite(value) for value in self._list(key, "numbers")]
        if None in found:
            raise self.error(key, "must be a list of finite numbers")
        return [number for number in found if number is not None]

    def integers(self, key: str) -> list[int]:
        """Return a list of integers >= 0; [] where there is none."""
        found = self._list(key, "integers")
        if not all(isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= _MOST for value in found):
            raise self.error(key, "must be a list of integers >= 0")
        return list(found)

    def flag(self, key: str, default: bool = False) -> bool:
        """Return whether the key is true."""
        value = self.raw(key)
        if value is None:
            return default
        if isinstance(value, bool) or value in (0, 1):  # some converters write numbers
            return bool(value)
        raise self.error(key, "must be true or false")

    def text(self, key: str, default: str = "") -> str:
        """Return the text of ``key``; ``default`` where there is none."""
        value = self.raw(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.error(key, "must be a text")
        return value

    def name(self, key: str) -> str:
        """Return a text that is short enough for an error to quote."""
        value = self.text(key)
        if len(value) > _MOST_NAME:
            raise self.error(key, f"must be a name of at most {_MOST_NAME} letters")
        return value

    def texts(self, key: str) -> list[str]:
        """Return a list of texts; [] where there is none."""
        found = self._list(key, "texts")
        if not all(isinstance(value, str) for value in found):
            raise self.error(key, "must be a list of texts")
        return list(found)

    def objects(self, key: str) -> list[Mapping[str, Any]]:
        """Return a list of objects; [] where there is none."""
        found = self._list(key, "objects")
        if not all(isinstance(value, Mapping) for value in found):
            raise self.error(key, "must be a list of objects")
        return list(found)

    def mapping(self, key: str) -> Mapping[str, Any]:
        """Return an object; an empty one where there is none."""
        value = self.raw(key)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            raise self.error(key, "must be an object")
        return value

    def at(self, key: str) -> ValueReader:
        """Return a reader of the object of that name."""
        return ValueReader(self.mapping(key), f"{self._where}: {key:.80}")

    def elements(self, key: str) -> ValueReader:
        """Return a reader of a list's elements, by their places as texts; of none where there is no list."""
        found = self._list(key, "texts or objects")
        return ValueReader({str(i): value for i, value in enumerate(found)}, f"{self._where}: {key:.80}")

    def missing(self, key: str) -> ModelLoadError:
        """Return the error that says that there is no such key."""
        return ModelLoadError(f"{self._where} has no {key!r:.80}, which this model needs")

    def _list(self, key: str, of: str) -> Sequence[Any]:
        value = self.raw(key)
        if value is None:
            return ()
        if not isinstance(value, list | tuple):
            raise self.error(key, f"must be a list of {of}")
        return value


def _finite(value: Any) -> float | None:
    """Return the number as a float; None for what is no number, or not finite as one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        number = float(value)
    except OverflowError:
        return None
    return number if math.isfinite(number) else None


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object out of a file. Raises ModelLoadError if it can't be read or is something else.

    An integer beyond 64 bits becomes a float: no setting is so large, and transformers writes some (``int(1e30)``).
    """
    value = read_any_json(path)
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} must hold a JSON object, not a {type(value).__name__}")
    return value


def read_any_json(path: Path) -> Any:
    """Read any JSON value from a file; apart from that like `read_json`."""
    text = read_text(path)
    try:
        value = json.loads(text, parse_int=_integer)
        if "\\u" in text:  # half a surrogate pair can be written so, and is no character
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path} is not valid JSON: {error}") from error
    return value


def read_text(path: Path) -> str:
    """Return the text of a file in UTF-8. Raises ModelLoadError if it can't be read, is too large, or is no text."""
    check_size(path)
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise ModelLoadError(f"{path} is no text in UTF-8: {error}") from error


def read_bytes(path: Path) -> bytes:
    """Return all bytes of a file. Raises ModelLoadError if it can't be read, or is too large."""
    check_size(path)
    try:
        return path.read_bytes()
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror or error}") from error


def check_size(path: Path) -> None:
    """Raise ModelLoadError for a file that is not there, or larger than any that is read whole."""
    try:
        size = path.stat().st_size
    except OSError as error:
        raise ModelLoadError(f"can't read {path}: {error.strerror or error}") from error
    if size > _MOST_BYTES:
        raise ModelLoadError(f"{path} is no file of a model's settings: it has {size} bytes, {_MOST_BYTES} at most")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) < 19 else _beyond_64_bits(digits)


def _beyond_64_bits(digits: str) -> int | float:
    if len(digits) < 30 and -(1 << 63) <= (value := int(digits)) < 1 << 64:
        return value
    return float(digits)


def check_settings(settings: Mapping[str, Any], where: str = "config.json") -> None:
    """Raise ModelLoadError for a count that no model has, or a ``model_type`` that is no name, whoever reads them."""
    values = ValueReader(settings, where)
    values.name("model_type")
    for key in _MOST_OF:
        if isinstance(values.raw(key), int | float):
            values.integer_or_none(key, least=0)


def check_nesting(value: Any, path: Path) -> None:
    """Raise ModelLoadError for a value that is nested too deeply to travel to another process."""
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > _MOST_DEPTH:
            raise ModelLoadError(f"{path} is nested more than {_MOST_DEPTH} deep: no model's settings are")
        level = [
            child
            for parent in level
            for child in (parent.values() if isinstance(parent, dict) else parent if isinstance(parent, list) else ())
        ]


def inner_path(folder: Path, name: object, named_in: Path) -> Path:
    """Return the path of a file within ``folder`` that the file ``named_in`` names.

    Raises ModelLoadError for a name that leads out of the folder: a model's files may not read others.
    """
    path = PurePosixPath(name) if isinstance(name, str) and "\0" not in name else None
    if path is None or path.is_absolute() or ".." in path.parts:
        raise ModelLoadError(f"{named_in} names the file {name!r:.80}, which is not within its folder")
    return folder / path


@contextmanager
def damage_explained(path: str | Path) -> Iterator[None]:
    """Convert an error that comes of a damaged model's values, within, to a ModelLoadError that says so.

    ``path``: of the model. Errors of the device and of the memory pass.
    """
    try:
        yield
    except AEngineError:
        raise
    except (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError) as error:
        logger.debug("the model's files are damaged", exc_info=error)
        raise ModelLoadError(
            f"{path}: config.json or a file beside it is damaged: {type(error).__name__}: {error!s:.200}"
        ) from error
