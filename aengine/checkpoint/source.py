"""`resolve_model`: from what the user calls a model to the files it lies in and what its settings are.

A name is tried as, in this order:

    embedded name      "smollm2-135m"         the .gguf that `aengine model add` fetched, or of an installed package
    .gguf file         "path/model.gguf"      also any file of a split one
    folder             "path/model"           config.json + *.safetensors, or a GGUF model
    hub id             "owner/repository"     fetched into the hub's cache; ":Q4_K_M" behind it: that GGUF model
"""

from __future__ import annotations

import difflib
import logging
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from ..config import EngineConfig
from ..errors import ModelLoadError
from ..outputs import StartupProgress
from . import hub
from .embedded import EMBEDDED_MODELS, find_embedded
from .gguf_choice import GgufChoice, choose_gguf
from .gguf_config import gguf_generation_config, gguf_hf_config
from .gguf_file import GgufFile
from .pooling import gguf_pooling, read_pooling
from .safetensors_files import check_whole, has_safetensors, stored_names
from .value_reader import check_nesting, check_settings, damage_explained, read_json

logger = logging.getLogger("aengine.checkpoint")

Progress = Callable[[StartupProgress], None]

_MOST_IDS = (1 << 31) - 1  # ids are int32
_TIED = "tie_word_embeddings"
_QUANTISED = ("quantization_config", "compression_config")


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model that was found. Plain data: it travels to the workers."""

    name: str
    """What the user asked for."""
    path: str
    """Local folder, or .gguf file (the first one of a split model)."""
    format: str
    """The weights' format: "safetensors", "gguf" or "dummy"."""
    hf_config: dict[str, Any]
    """config.json's content (`text_config`: what it says of the text model); for a GGUF made from its metadata."""
    generation_config: dict[str, Any] = field(default_factory=dict)
    """generation_config.json's content: eos_token_id (one or a list), ...; {} if there is none."""
    pooling: dict[str, Any] = field(default_factory=dict)
    """A `PoolingConfig`, as plain data."""

    @property
    def vocab_size(self) -> int | None:
        """Tokens of the model; None: config.json does not say, or says nonsense, which the worker refuses."""
        size = self.hf_config.get("vocab_size")
        return size if _is_id(size, _MOST_IDS) and size else None

    @property
    def eos_token_ids(self) -> list[int]:
        """The ids that end a text. What is no id of the model's vocabulary is left out, with a warning."""
        given = self.generation_config.get("eos_token_id", self.hf_config.get("eos_token_id"))
        values = given if isinstance(given, list) else [] if given is None else [given]
        most = self.vocab_size or _MOST_IDS
        found = [value for value in values if _is_id(value, most)]
        if len(found) < len(values):
            odd = next(value for value in values if not _is_id(value, most))
            logger.warning(
                "%s: eos_token_id %.80r is no token of the model, which has %d; it is left out", self.path, odd, most
            )
        return found

    def to_wire(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_wire(cls, wire: Mapping[str, Any]) -> ModelSource:
        return cls(**wire)


def _is_id(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < most


def resolve_model(config: EngineConfig, progress: Progress | None = None) -> ModelSource:
    """Find ``config.model`` and read its settings. Blocking: reads files, may download.

    Raises ModelLoadError saying what was looked for, where, and what there is instead.
    """
    if progress is not None:
        progress(StartupProgress("resolve", detail=config.model))
    dummy = config.load_format == "dummy"
    choice = GgufChoice(pattern=config.gguf_file) if config.gguf_file else None
    if choice is None and config.load_format == "gguf":
        choice = GgufChoice()
    code = config.trust_remote_code
    path = locate(config.model, config.revision, weights=not dummy, choice=choice, code=code, progress=progress)
    with damage_explained(path):
        return _read_settings(path, config, choice)


def _read_settings(path: Path, config: EngineConfig, choice: GgufChoice | None) -> ModelSource:
    """Read the model's settings from the files at ``path``. Raises ModelLoadError."""
    dummy = config.load_format == "dummy"
    if path.is_dir():
        path = weights_in(path, config.load_format, choice)
    if path.is_file():
        if config.load_format == "safetensors":
            raise ModelLoadError(f"load_format='safetensors', but {path} is a GGUF file")
        if config.model_impl == "transformers":
            raise ModelLoadError(
                f"model_impl='transformers': it is for models of safetensors, and {path} is a GGUF file: leave it at "
                f"'auto', or give the folder or hub id of the checkpoint that it was made from"
            )
        with GgufFile(path) as file:
            settings, generation = gguf_hf_config(file), gguf_generation_config(file)
            path, pooling = file.path, gguf_pooling(file).to_wire()
        return ModelSource(config.model, str(path), "dummy" if dummy else "gguf", settings, generation, pooling)
    settings = text_config(read_json(path / "config.json"), None if dummy else path)
    settings |= _quantised_beside(path, settings)
    generation_file = path / "generation_config.json"
    generation = read_json(generation_file) if generation_file.is_file() else {}
    check_nesting(settings, path / "config.json")
    check_settings(settings)
    check_nesting(generation, generation_file)
    pooling = read_pooling(path, settings).to_wire()
    return ModelSource(config.model, str(path), "dummy" if dummy else "safetensors", settings, generation, pooling)


def _quantised_beside(folder: Path, settings: Mapping[str, Any]) -> dict[str, Any]:
    """What ModelOpt's own file says of a checkpoint whose config.json says nothing of it, in config.json's words."""
    file = folder / "hf_quant_config.json"
    if any(settings.get(key) for key in _QUANTISED) or not file.is_file():
        return {}
    found = read_json(file)
    check_nesting(found, file)
    how = found.get("quantization")
    return {_QUANTISED[0]: {**how, "quant_method": "modelopt"}} if isinstance(how, dict) else {}


def text_config(hf_config: Mapping[str, Any], folder: Path | None = None) -> dict[str, Any]:
    """Return the content itself if it is of a text model alone, else the text model's, which lies below ``text_config``
    beside those for images.

    What the latter leaves open (dtype, special tokens, quantization) is as above it. Whether embeddings are tied is
    read above only, as transformers does. Where nothing is said there, transformers takes a default of its class for
    the whole model, and ``folder`` decides: with safetensors of which none is an output matrix they are tied.
    """
    text = hf_config.get("text_config")
    if not isinstance(text, Mapping):
        return dict(hf_config)
    parts = {key for key in hf_config if key.endswith("_config")} - set(_QUANTISED)
    above = {key: value for key, value in hf_config.items() if key not in parts}
    settings = {**above, **{key: value for key, value in text.items() if value is not None}}
    tied = above.get(_TIED)
    if tied is None and folder is not None:
        names = stored_names(folder)
        tied = not any("lm_head" in name.split(".") for name in names) if names else None
    return settings if tied is None else {**settings, _TIED: tied}


def locate(
    name: str,
    revision: str | None = None,
    *,
    weights: bool = True,
    choice: GgufChoice | None = None,
    code: bool = False,
    progress: Progress | None = None,
) -> Path:
    """Return the folder or .gguf file that ``name`` means. Blocking. Raises ModelLoadError.

    ``code``: of a hub repository fetch the Python files too.
    ``choice``: of a hub repository fetch the GGUF model that it means. (Of a folder `weights_in` chooses.)
    """
    found = _found_here(name, choice)
    if found is not None:
        if revision is not None:
            raise ModelLoadError(f"revision={revision!r} is for hub ids, and the model is {found}: leave it out")
        return found
    path = Path(name).expanduser()
    # "models/llama" may be meant as a path: only ask the hub when no such parent folder is here.
    if hub.is_hub_id(name) and not path.parent.is_dir():
        return hub.fetch(name, revision, weights=weights, choice=choice, code=code, progress=progress)
    raise ModelLoadError(_unknown(name, path))


def _found_here(name: str, choice: GgufChoice | None) -> Path | None:
    """Return the folder or .gguf file that an embedded name or a path means; None: it is neither."""
    if name.lower() in EMBEDDED_MODELS:
        return _chosen(find_embedded(name.lower()), choice)
    try:
        path = Path(name).expanduser()
        is_dir, is_file = path.is_dir(), path.is_file()
    except (OSError, ValueError, RuntimeError) as error:  # a name too long, a null character, a ~user that is none
        raise ModelLoadError(f"{name[:200]!r} can't be a model's name: {error}") from error
    if is_dir:
        return path.resolve()
    if is_file and path.suffix.lower() != ".gguf":
        raise ModelLoadError(f"{path} is a file, but no .gguf: give the folder with config.json, or a .gguf file")
    return _chosen(path.absolute(), choice) if is_file else None


def _chosen(file: Path, choice: GgufChoice | None) -> Path:
    """Return the only file that there is. Raises ModelLoadError: ``choice`` means another."""
    if choice is not None and not choice.matches(file.name):
        raise ModelLoadError(f"{choice}: the model is one file, {file}: leave the choice out")
    return file


def weights_in(folder: Path, load_format: str, choice: GgufChoice | None = None) -> Path:
    """Return the folder itself if it is a Hugging Face checkpoint, else the GGUF file in it that ``choice`` means."""
    has_config = (folder / "config.json").is_file()
    if choice is None or not choice.pattern:
        if load_format in ("auto", "safetensors"):
            if has_config and has_safetensors(folder):
                check_whole(folder)
                return folder
        elif load_format == "dummy" and has_config:
            return folder
    sizes = {file.name: file.stat().st_size for file in folder.glob("*.gguf")}
    if not sizes or load_format == "safetensors":
        raise ModelLoadError(_not_a_model(folder, load_format, has_config))
    return folder / choose_gguf(sizes, choice or GgufChoice(), str(folder))[0]


def _not_a_model(folder: Path, load_format: str, has_config: bool) -> str:
    wanted = {
        "auto": "config.json with *.safetensors, or a .gguf file",
        "safetensors": "config.json with *.safetensors",
        "gguf": "a .gguf file",
        "dummy": "config.json, or a .gguf file",
    }[load_format]
    message = f"{folder} holds no model: looked for {wanted} (load_format={load_format!r})"
    if load_format != "dummy" and (any(folder.glob("*.bin")) or any(folder.glob("*.pth"))):
        return message + "; it has pickled weights, which aengine does not read: convert them to safetensors"
    if has_config:
        return message + "; it has config.json, but no weights (load_format='dummy' would make random ones)"
    files = sorted(file.name for file in folder.iterdir())
    return message + ("; it holds " + ", ".join(files[:8]) if files else "; it is empty")


def _unknown(name: str, path: Path) -> str:
    known = ", ".join(EMBEDDED_MODELS)
    nearest = difflib.get_close_matches(name.lower(), EMBEDDED_MODELS)
    message = (
        f"there is no model {name!r}: it is neither an embedded one ({known}), nor the folder or file {path.absolute()}"
    )
    if "/" not in name:
        message += ", nor is it a hub id (OWNER/REPOSITORY)"
    if nearest:
        return f"{message}; did you mean {nearest[0]!r}?"
    if path.parent.is_dir():
        siblings = [p.name for p in path.parent.iterdir() if p.is_dir() or p.suffix == ".gguf"]
        similar = difflib.get_close_matches(path.name, siblings)
        if similar:
            return f"{message}; in that folder there is {', '.join(map(repr, similar))}"
    return message
