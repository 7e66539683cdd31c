"""Fetching a model's files from the Hugging Face hub into its cache; progress goes to a callback only."""

from __future__ import annotations

import logging
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ..config import StartupProgress, is_offline
from ..errors import ModelLoadError

__all__ = ["fetch", "is_hub_id"]

logger = logging.getLogger("aengine.checkpoint")

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_TOKENIZER_FILES = ("*.json", "*.jinja")
_WEIGHT_FILES = ("*.safetensors",)
_DUPLICATES = ("consolidated*", "original/*", "onnx/*")  # the same weights again, in other layouts


def is_hub_id(name: str) -> bool:
    """Whether ``name`` looks like OWNER/REPOSITORY."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def fetch(
    name: str,
    revision: str | None,
    *,
    weights: bool,
    progress: Callable[[StartupProgress], None] | None = None,
) -> Path:
    """Bring a repository's settings and tokenizer (and ``weights``) into the hub's cache; returns the folder.

    Blocking. What is cached already is not fetched again; with HF_HUB_OFFLINE only the cache is looked at.
    Raises ModelLoadError with the cause and what helps.
    """
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import (
        GatedRepoError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    offline = is_offline()
    logger.info("looking for %s on the hub%s", name, " (its cache only: HF_HUB_OFFLINE)" if offline else "")
    try:
        return Path(
            snapshot_download(
                name,
                revision=revision,
                allow_patterns=[*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ())],
                ignore_patterns=list(_DUPLICATES),
                local_files_only=offline,
                tqdm_class=_progress_bar(name, progress),
            )
        )
    except GatedRepoError as error:
        hint = "its owner wants you to ask for access on the hub, and to log in with `hf auth login`"
        raise ModelLoadError(f"the hub refuses {name}: {hint}") from error
    except RepositoryNotFoundError as error:
        hint = "is it spelled right? a private one needs `hf auth login`"
        raise ModelLoadError(f"there is no model {name!r} on the hub ({hint}), and no such local folder") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"the model {name!r} on the hub has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        if offline:
            hint = "HF_HUB_OFFLINE is set and the hub's cache lacks it: fetch it once with the variable unset"
        else:
            hint = "the hub can't be reached and its cache lacks it: check the network, or give a local folder"
        raise ModelLoadError(f"can't get the model {name!r}: {hint}") from error
    except Exception as error:
        raise ModelLoadError(f"can't get the model {name!r} from the hub: {type(error).__name__}: {error}") from error


def _progress_bar(name: str, progress: Callable[[StartupProgress], None] | None) -> type[Any]:
    """A tqdm class that draws nothing and reports the bytes fetched to ``progress``."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            kwargs.pop("name", None)
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None and self._in_bytes:
                progress(StartupProgress("resolve", int(self.n), int(self.total or 0), "bytes", name))

    # tqdm's default lock is a multiprocessing one, which starts a helper process.
    Bar.set_lock(threading.RLock())
    return Bar
