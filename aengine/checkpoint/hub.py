"""Fetching a model's files from the Hugging Face hub into its cache; progress goes to a callback only.

HF_HOME (the cache's place), HF_TOKEN, HF_ENDPOINT and HF_HUB_OFFLINE mean what they mean to `huggingface_hub`.
"""

from __future__ import annotations

import contextlib
import errno
import glob
import logging
import re
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from ..config import is_offline
from ..errors import ModelLoadError
from ..outputs import StartupProgress
from .gguf_choice import GgufChoice, choose_gguf

logger = logging.getLogger("aengine.checkpoint")

_HUB_ID = re.compile(r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<quant>[A-Za-z0-9][\w.-]*))?")
_TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model*", "spiece.model", "vocab.txt")
_TOKENIZERS = ("tokenizer.json", "tekken.json", "tokenizer.model", "spiece.model", "vocab.txt")
_WEIGHT_FILES = ("*.safetensors",)
_CODE_FILES = ("*.py",)
_DUPLICATES = ("consolidated*", "original/*", "onnx/*")  # files with the same weights in other layouts
_DISK_ERRORS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.ENOTDIR, errno.EEXIST)
_LOG_IN = "set HF_TOKEN, or run `hf auth login`"

Progress = Callable[[StartupProgress], None]


def is_hub_id(name: str) -> bool:
    """Return whether ``name`` looks like OWNER/REPOSITORY, or OWNER/REPOSITORY:QUANTISATION."""
    return _HUB_ID.fullmatch(name) is not None and not name.endswith(".gguf")


def fetch(
    name: str,
    revision: str | None,
    *,
    weights: bool,
    choice: GgufChoice | None = None,
    code: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Bring a model into the hub's cache. Returns its folder, or the (first) .gguf file of a model in GGUF.

    That is taken if ``name`` ends in ":QUANTISATION", if there is a ``choice``, or if the repository holds no
    safetensors (no tokenizer, if no ``weights`` are asked for). Of other repositories come settings and tokenizer, and
    ``weights`` and ``code`` (Python files) if asked for. Blocking. What is cached already is not fetched again; with
    HF_HUB_OFFLINE only the cache is looked at. Raises ModelLoadError with the cause and what helps.
    """
    match = _HUB_ID.fullmatch(name)
    assert match is not None
    repo = match["repo"]
    if choice is None and match["quant"]:
        choice = GgufChoice(quant=match["quant"])
    logger.info("looking for %s on the hub%s", name, " (its cache only: HF_HUB_OFFLINE)" if is_offline() else "")
    with _explained(repo, revision):
        sizes, where = file_sizes(repo, revision)
        wanted = (".safetensors",) if weights else _TOKENIZERS
        has_wanted = any(file.endswith(wanted) and "/" not in file for file in sizes)
        has_gguf = any(file.lower().endswith(".gguf") for file in sizes)
        # Settings alone are fetched too: the caller reports what is missing beside them.
        if choice is None and (has_wanted or ("config.json" in sizes and not has_gguf)):
            patterns = [*_TOKENIZER_FILES, *(_WEIGHT_FILES if weights else ()), *(_CODE_FILES if code else ())]
            return _snapshot(repo, revision, patterns, progress)
        files = choose_gguf(sizes, choice or GgufChoice(), where)
        folder = _snapshot(repo, revision, [glob.escape(file) for file in files], progress)
        return folder / files[0]


def fetch_files(name: str, files: Sequence[str]) -> Path:
    """Bring some of a repository's files into the hub's cache, those that it has. Returns their folder. Blocking, and
    raises, as `fetch`."""
    logger.info("looking for %s on the hub%s", name, " (its cache only: HF_HUB_OFFLINE)" if is_offline() else "")
    with _explained(name, None):
        return _snapshot(name, None, [glob.escape(file) for file in files], None)


def _snapshot(repo: str, revision: str | None, patterns: list[str], progress: Progress | None) -> Path:
    from huggingface_hub import snapshot_download

    return Path(
        snapshot_download(
            repo,
            revision=revision,
            allow_patterns=patterns,
            ignore_patterns=list(_DUPLICATES),
            local_files_only=is_offline(),
            tqdm_class=_progress_bar(repo, progress),
        )
    )


def file_sizes(repo: str, revision: str | None) -> tuple[dict[str, int], str]:
    """Return the names of a repository's files and their bytes, and where that is from: the hub, or else its cache."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.errors import (
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    cause: Exception | None = None
    if not is_offline():
        try:
            info = HfApi().model_info(repo, revision=revision, files_metadata=True)
            return {file.rfilename: file.size or 0 for file in info.siblings or ()}, f"the hub's {repo}"
        except (RepositoryNotFoundError, RevisionNotFoundError):
            raise
        except Exception as error:  # the network's own errors differ from release to release of the library
            cause = error
    try:
        folder = Path(snapshot_download(repo, revision=revision, allow_patterns=[], local_files_only=True))
    except LocalEntryNotFoundError as error:
        if isinstance(cause, HfHubHTTPError):
            raise cause from None
        raise error from cause
    sizes = {str(file.relative_to(folder)): file.stat().st_size for file in folder.rglob("*") if file.is_file()}
    why = "HF_HUB_OFFLINE is set" if is_offline() else "the hub can't be reached"
    return sizes, f"the cache of the hub's {repo} ({why})"


@contextlib.contextmanager
def _explained(repo: str, revision: str | None) -> Iterator[None]:
    """Convert every failure within to a ModelLoadError whose message names the cure."""
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        yield
    except ModelLoadError:
        raise
    except GatedRepoError as error:
        hint = f"it is gated: request access on its page on the hub, and log in: {_LOG_IN}"
        raise ModelLoadError(f"the hub refuses {repo}: {hint}") from error
    except RepositoryNotFoundError as error:
        hint = f"is it spelled right? for a private one {_LOG_IN}"
        raise ModelLoadError(f"there is no model {repo!r} on the hub ({hint}), and no such local folder") from error
    except RevisionNotFoundError as error:
        raise ModelLoadError(f"the model {repo!r} on the hub has no revision {revision!r}") from error
    except LocalEntryNotFoundError as error:
        if (problem := disk_problem(error)) is not None:
            raise problem from error
        if is_offline():
            hint = "HF_HUB_OFFLINE is set and the hub's cache lacks it: fetch it once with the variable unset"
        else:
            hint = "the hub can't be reached and its cache lacks it: check the network, or give a local folder"
        raise ModelLoadError(f"can't get the model {repo!r}: {hint}") from error
    except HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        hint = f"; is the token valid? {_LOG_IN}" if status in (401, 403) else ""
        raise ModelLoadError(f"can't get the model {repo!r}: the hub answered {status}{hint} ({error})") from error
    except Exception as error:
        if (problem := disk_problem(error)) is not None:
            raise problem from error
        raise ModelLoadError(f"can't get the model {repo!r} from the hub: {type(error).__name__}: {error}") from error


def disk_problem(error: BaseException | None) -> ModelLoadError | None:
    """Return the error to raise when a failed write to the cache is behind ``error``; None if it is something else."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _DISK_ERRORS:
            where = f" ({error.filename})" if error.filename else ""
            hint = "set HF_HOME to a folder that can be written and has room"
            return ModelLoadError(f"can't write to the hub's cache: {error.strerror}{where}; {hint}")
        error = error.__cause__ or error.__context__
    return None


def _progress_bar(name: str, progress: Progress | None) -> type[Any]:
    """Return a tqdm class that draws nothing and reports the bytes fetched to ``progress``."""
    from tqdm import tqdm

    class Bar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._in_bytes = kwargs.get("unit") == "B"
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> None:
            self.n += n or 0
            if progress is not None and self._in_bytes:
                progress(StartupProgress("resolve", int(self.n), int(self.total or 0), "bytes", name))

    # tqdm's default lock is a multiprocessing one, which starts a helper process.
    Bar.set_lock(threading.RLock())
    return Bar
