"""``aengine doctor``: one page on what the engine finds here, what it would choose, and what to do."""

from __future__ import annotations

import argparse
import json
import sys
import textwrap
from typing import TYPE_CHECKING, Any

from ..__version__ import __version__
from .engine_options import add_engine_options, engine_config

if TYPE_CHECKING:
    from .diagnosis import Diagnosis

_WIDTH = 110
_MARGIN = 22
_MARKS = {"ok": "ok", "note": "note", "warning": "WARNING", "error": "ERROR"}


def add_doctor_parser(commands: Any) -> None:
    text = "what the engine finds on this machine, what it would choose, and what to do about what is wrong"
    epilog = "exit status: 0 if an engine can run here, perhaps with warnings; 1 if not"
    parser = commands.add_parser("doctor", help=text, description=text, epilog=epilog)
    parser.add_argument("model", nargs="?", help="a model that is here: what its weights and KV would take in memory")
    add_engine_options(parser)
    parser.add_argument("--json", action="store_true", help="the same as one JSON object")
    parser.set_defaults(main=doctor)


def doctor(args: argparse.Namespace) -> int:
    from .diagnosis import diagnose

    diagnosis = diagnose(f"aengine {__version__}", engine_config(args) if args.model is not None else None)
    if args.json:
        print(json.dumps(diagnosis.to_json(), indent=2))
    else:
        sys.stdout.write(page(diagnosis))
    return 0 if diagnosis.ok else 1


def page(diagnosis: Diagnosis) -> str:
    """Return the diagnosis as text, at most 110 columns wide."""
    lines = [diagnosis.version, ""]
    for finding in diagnosis.findings:
        head = f"{_MARKS[finding.status]:<8}{finding.name:<{_MARGIN - 8}}"
        lines += _wrapped(head, finding.found)
        if finding.advice:
            lines += _wrapped(" " * (_MARGIN - 3) + "-> ", finding.advice)
    if diagnosis.choices:
        lines += ["", *_wrapped(f"{'it would choose':<{_MARGIN}}", _choices(diagnosis.choices))]
    errors, warnings = (sum(f.status == status for f in diagnosis.findings) for status in ("error", "warning"))
    verdict = "an engine can run here" if diagnosis.ok else "no engine can run here until the errors are mended"
    counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return "\n".join([*lines, "", f"{verdict} ({counts})", ""])


def _choices(choices: dict[str, Any]) -> str:
    parts = [f"device {choices['device']}", f"{choices['threads']} thread{'s' * (choices['threads'] != 1)}"]
    if "weights" in choices:
        parts.append(f"weights in {choices['weights']}, activations in {choices['activations']}")
    parts.append(f"attention by {choices['attention']}")
    parts.append(
        f"up to {choices['kv_cache_bytes'] / 1024**3:.1f} GiB for weights and KV cache"
        if choices["device"] != "cpu"
        else f"a KV cache of {choices['kv_cache_bytes'] / 1024**3:.1f} GiB at most"
    )
    return "; ".join(parts)


def _wrapped(head: str, text: str) -> list[str]:
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * _MARGIN,
        break_on_hyphens=False,
        break_long_words=False,
    )
