"""Settings out of environment variables, see `EngineConfig.from_env`."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from .errors import InvalidRequestError
from .params import nearest

__all__ = ["read_settings", "value_of"]

_NO_SETTINGS = {"API_KEY"}
"""What variables of the command line have behind the prefix."""

_OF_KUBERNETES = re.compile(r"(^|_)(SERVICE_HOST|SERVICE_PORT(_\w+)?|PORT(_\d+_(TCP|UDP|SCTP)(_PROTO|_PORT|_ADDR)?)?)$")
"""Ends of variables that Kubernetes sets in each pod, with the name of a service before them: "aengine", for one."""

_PAGE = "https://github.com/aengine/aengine/blob/main/docs/settings.md"

_BOOLEANS = {
    **dict.fromkeys(("1", "true", "yes", "on"), True),
    **dict.fromkeys(("0", "false", "no", "off"), False),
}


def read_settings(config_class: type, prefix: str, environment: Mapping[str, str]) -> dict[str, Any]:
    """Name to value of the settings that variables with ``prefix`` give; those that are empty give none.

    Raises InvalidRequestError for a variable that names no setting, or can't be read as its type.
    """
    if not isinstance(prefix, str) or not prefix:
        raise InvalidRequestError(f"prefix={prefix!r} is not valid: it must be a non-empty string", param="prefix")
    types: dict[str, str] = config_class.__annotations__
    names = {f"{prefix}{name.upper()}": name for name in types}
    read: dict[str, Any] = {}
    for variable, text in environment.items():
        if not variable.startswith(prefix):
            continue
        name = names.get(variable)
        if name is None:
            rest = variable.removeprefix(prefix)
            if rest in _NO_SETTINGS or _OF_KUBERNETES.search(rest):
                continue
            near = nearest(rest.lower(), set(types))
            hint = f"did you mean {prefix + near.upper()!r}?" if near else f"{_PAGE} lists them"
            message = f"in the environment: there is no setting {variable!r}; {hint}"
            raise InvalidRequestError(message, param=variable)
        text = text.strip()
        if text:
            read[name] = value_of(variable, name, types[name], text)
    return read


def value_of(variable: str, name: str, type_name: str, text: str) -> Any:
    """Read a setting's value. ``type_name``: as it stands in the class, "int | None".

    Raises InvalidRequestError, which names ``variable``.
    """
    if type_name.startswith("Callable"):
        raise InvalidRequestError(f"{variable}: a function can't be given in the environment", param=name)
    kind = type_name.removesuffix(" | None")
    if kind != type_name and text.lower() == "none":
        return None
    wanted = "1 or 0, true or false, yes or no, on or off"
    try:
        if kind == "bool":
            return _BOOLEANS[text.lower()]
        if kind == "int":
            wanted = "an integer"
            return int(text)
        if kind == "float":
            wanted = "a number"
            return float(text)
    except (KeyError, ValueError):
        raise InvalidRequestError(f"{variable}={text!r} is not valid: it must be {wanted}", param=name) from None
    return text
