"""The choice of a GGUF model out of a folder or a hub repository, from the names of its files."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from ..errors import ModelLoadError
from .gguf_file import SHARD_NAME

_SHOWN = 24  # the largest repositories hold about thirty


@dataclass(frozen=True, slots=True)
class GgufChoice:
    """A user's choice among files: a glob pattern of names ("*Q4_K_M*"), or a quantisation ("Q4_K_M"); "": any."""

    pattern: str = ""
    quant: str = ""

    def __str__(self) -> str:
        return f"gguf_file={self.pattern!r}" if self.pattern else f"quantisation {self.quant!r}"

    def matches(self, name: str) -> bool:
        """Return whether the file ``name``, with its folders, is meant. Upper and lower case are one."""
        if self.pattern:
            pattern, path = self.pattern.lower(), name.lower()
            return fnmatchcase(path, pattern) or fnmatchcase(path.rpartition("/")[2], pattern)
        if self.quant:
            return re.search(rf"(?<![A-Za-z0-9_]){re.escape(self.quant)}(?![A-Za-z0-9_])", name, re.I) is not None
        return True


def choose_gguf(sizes: dict[str, int], choice: GgufChoice, where: str) -> list[str]:
    """Return the files of the one model that ``choice`` means; several, in order, if it is split.

    ``sizes``: the names of all files (paths with "/", relative to the repository) and their bytes, 0 if unknown.
    Raises ModelLoadError, listing what there is, if it is none, several, or incomplete.
    """
    models: dict[str, list[str]] = {}
    for name in sorted(sizes):
        # A projector of images beside a model is not one.
        if name.lower().endswith(".gguf") and not name.rpartition("/")[2].lower().startswith("mmproj"):
            models.setdefault(_without_number(name), []).append(name)
    if not models:
        raise ModelLoadError(f"{where} holds no .gguf file" + _listed(sizes, [[name] for name in sizes]))
    wanted = [files for files in models.values() if any(map(choice.matches, files))]
    if not wanted:
        raise ModelLoadError(f"{where} has no GGUF file for {choice}" + _listed(sizes, models.values()))
    if len(wanted) > 1:
        problem = f"several GGUF models for {choice}" if choice != GgufChoice() else "several GGUF models"
        cure = 'choose one by gguf_file="NAME" (or a pattern as "*Q4_K_M*")'
        raise ModelLoadError(f"{where} holds {problem}: {cure}" + _listed(sizes, wanted))
    files = wanted[0]
    match = SHARD_NAME.fullmatch(files[0])
    if match is not None and len(files) != int(match["count"]):
        missing = int(match["count"]) - len(files)
        raise ModelLoadError(f"{where} lacks {missing} of the {match['count']} files of {files[0]}")
    return files


def _without_number(name: str) -> str:
    """Return the name of the model that a file belongs to: files of a split one differ in their numbers only."""
    match = SHARD_NAME.fullmatch(name)
    return f"{match['stem']}-of-{match['count']}.gguf" if match is not None else name


def _listed(sizes: dict[str, int], models: Iterable[list[str]]) -> str:
    lines = []
    for files in models:
        nbytes = sum(sizes[name] for name in files)
        split = f", {len(files)} files" if len(files) > 1 else ""
        lines.append(f"{files[0]} ({nbytes / 1e6:,.0f} MB{split})" if nbytes else files[0])
    if not lines:
        return "; it is empty"
    more = f", and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "; it has: " + ", ".join(lines[:_SHOWN]) + more
