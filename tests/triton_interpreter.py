"""Triton's interpreter, quick enough for tests."""

from __future__ import annotations

import inspect
from typing import Any


def look_up_builtins_once() -> None:
    """Make the interpreter remember which builtins it replaces in Triton's modules.

    It looks at all their members again at each call of a jitted function by another: a fifth of all its time.
    """
    try:
        from triton.language import core
        from triton.runtime import interpreter
    except ImportError:
        return
    names: dict[Any, list[str]] = {}

    def patch_builtin(package: Any, *context: Any) -> None:
        if package not in names:
            names[package] = [name for name, member in inspect.getmembers(package) if core.is_builtin(member)]
        for name in names[package]:
            member = getattr(package, name)
            if core.is_builtin(member):  # not replaced already, by the call that this one is inside of
                interpreter._patch_attr(package, name, member, *context)

    interpreter._patch_builtin = patch_builtin
