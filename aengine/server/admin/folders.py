"""Folders that requests may name: those inside one that the operator has named."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import Field

from ..http import HTTPError
from ..openai.requests import Text

FolderPath = Annotated[Text, Field(min_length=1, max_length=4096)]
_MOST_FILES = 1000  # that a folder may have


def folder_within(root: str | None, path: str, option: str, param: str) -> str:
    """Return the absolute path of a folder inside ``root``, of which it may be a relative path. Blocking. ``option``:
    of the command line, that has named the root; ``param``: the field of the path.

    Raises HTTPError 403: there is no root, or the folder, or a file in it, is or leads out of there; 404: there is no
    such folder.
    """
    name = option.removeprefix("--").replace("-", "_")
    if root is None:
        message = f"folders come from one alone: start the server with {option} DIR (create_app({name}=...))"
        raise HTTPError(403, message, kind="permission_error", code=f"{name}_not_set")
    try:
        base = Path(root).resolve(strict=True)
        folder = (base / path).resolve()
        is_within = folder.is_relative_to(base)
        if is_within and not folder.is_dir():
            message = f"there is no folder {path[:200]!r} in the server's {option}"
            raise HTTPError(404, message, code="not_found", param=param)
        files = [] if not is_within else [one for _, one in zip(range(_MOST_FILES), folder.iterdir(), strict=False)]
        is_within = is_within and all(file.resolve().is_relative_to(base) for file in files)
    except (OSError, ValueError, RuntimeError) as error:  # no such root; a null character; links in a circle
        raise HTTPError(404, f"{path[:200]!r} can't be looked up", code="not_found", param=param) from error
    if not is_within or len(files) >= _MOST_FILES:
        message = f"{path[:200]!r} is not inside the server's {option}, or has links out of it"
        raise HTTPError(403, message, kind="permission_error", code=f"outside_{name}", param=param)
    return str(folder)
