"""Prints the texts of transformers' layers, attention, norms, rotary embeddings and feed-forward layers, each once: its
digest, whether aengine/runner/models/transformers/forms.py knows it, which classes have it, and the text.

    PYTHONPATH=$PWD python tests/stress/transformers_forms.py

Read a text before its digest is added there.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
import textwrap
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import transformers.models
from torch import nn

from aengine.runner.models.transformers import forms

ENDS = ("DecoderLayer", "Attention", "RMSNorm", "MLP", "RotaryEmbedding")


def functions() -> Iterator[tuple[str, str, Callable[..., Any]]]:
    """Kind, owner and function."""
    for package in pkgutil.iter_modules(transformers.models.__path__):
        try:
            module = importlib.import_module(f"transformers.models.{package.name}.modeling_{package.name}")
        except ImportError:
            continue
        for name, value in vars(module).items():
            if getattr(value, "__module__", "") != module.__name__:
                continue
            if isinstance(value, type) and issubclass(value, nn.Module):
                kind = next((end for end in ENDS if name.endswith(end)), None)
                if kind is not None:
                    yield kind, name, value.forward
            elif name in ("apply_rotary_pos_emb", "rotate_half"):
                yield name, package.name, value


def main() -> None:
    warnings.simplefilter("ignore")
    known = inspect.getsource(forms)
    found: dict[tuple[str, str], tuple[list[str], str]] = {}
    for kind, owner, function in functions():
        form = forms.form_of(function)
        if form:
            text = inspect.getsource(inspect.unwrap(function))
            found.setdefault((kind, form), ([], text))[0].append(owner)
    for (kind, form), (owners, text) in sorted(found.items(), key=lambda item: (item[0][0], -len(item[1][0]))):
        print(f"{kind} {form} {'known' if form in known else ''}: {', '.join(owners)}\n{textwrap.dedent(text)}")


if __name__ == "__main__":
    main()
