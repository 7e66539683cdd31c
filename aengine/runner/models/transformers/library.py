"""The package transformers: whether it is there, what class of it a config.json means, and modules without weights."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from ....errors import ModelLoadError
from .attention import ATTENTION, register

_LEAST_VERSION = (5, 17)
_INSTALL = "pip install 'transformers>=5.17'"


class ModelFiles:
    """A model's settings, where its files are, and whether code among them may be run."""

    def __init__(self, hf: Mapping[str, Any], folder: str | None, trust_remote_code: bool) -> None:
        self.hf = dict(hf)
        self.folder = folder
        self.trust_remote_code = trust_remote_code

    @property
    def model_type(self) -> str:
        return str(self.hf.get("model_type"))


def library_version() -> str:
    """Return the version of transformers. Raises ModelLoadError if it is missing or too old."""
    try:
        installed = version("transformers")
    except PackageNotFoundError:
        raise ModelLoadError(f"transformers is not installed: {_INSTALL}") from None
    numbers = tuple(int(part) for part in installed.split(".")[:2] if part.isdigit())
    if numbers < _LEAST_VERSION:
        least = ".".join(map(str, _LEAST_VERSION))
        raise ModelLoadError(f"transformers {installed} is too old, {least} is needed: {_INSTALL}")
    return installed


def read_hf_config(files: ModelFiles) -> Any:
    """Return the config of transformers' class for the text of this model.

    Raises ModelLoadError: transformers has no such architecture; its code is among the model's files, and must not run.
    """
    library_version()
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    is_remote = _code_of(files, "AutoConfig") is not None
    if files.model_type not in CONFIG_MAPPING:
        if not is_remote:
            raise ModelLoadError(
                f"model_type {files.model_type!r} is not supported: aengine has no file for it, and transformers "
                f"{library_version()} does not know it either; a later one may. `aengine models` lists what runs"
            )
        _check_trust(files)
    with _quietly(), _explained(files, "config.json can't be read"):
        if is_remote and files.trust_remote_code:
            return AutoConfig.from_pretrained(str(files.folder), trust_remote_code=True)
        settings = {key: _plain(value) for key, value in files.hf.items() if key != "model_type"}
        return CONFIG_MAPPING[files.model_type].from_dict(settings)


def _plain(value: Any) -> Any:
    """Return the value of a config.json, in which transformers writes infinities as {"__float__": "Infinity"}."""
    if isinstance(value, list):
        return [_plain(item) for item in value]
    if not isinstance(value, dict):
        return value
    if set(value) == {"__float__"}:
        return float(value["__float__"])
    return {key: _plain(item) for key, item in value.items()}


def _code_of(files: ModelFiles, kind: str) -> str | None:
    """Return what auto_map of config.json names as a class of its own, "file.Class"; None: nothing.

    Raises ModelLoadError for trusted code of another repository ("owner/repository--file.Class"): transformers would
    fetch that of today, which nobody has read, whatever revision the weights are of.
    """
    code = (files.hf.get("auto_map") or {}).get(kind)
    if not code:
        return None
    if files.trust_remote_code and "--" in str(code):
        raise ModelLoadError(
            f"auto_map of config.json names code of another repository ({str(code)[:100]!r}), and trust_remote_code is "
            f"for code that lies beside the weights: read that code, copy it there, and leave out what is before '--'"
        )
    return str(code)


def _check_trust(files: ModelFiles) -> None:
    if not files.trust_remote_code or files.folder is None:
        raise ModelLoadError(
            f"model_type {files.model_type!r} is computed by Python code that lies beside the weights (auto_map of "
            f"config.json), which is not run unless you ask for it: read that code, then give trust_remote_code=True "
            f"(--trust-remote-code)"
        )


def _model_class(config: Any, files: ModelFiles) -> tuple[Any, Any]:
    """Return the class of a causal language model, and the config that it takes, which may be a part of ``config``."""
    from transformers.dynamic_module_utils import get_class_from_dynamic_module
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING

    remote = _code_of(files, "AutoModelForCausalLM")
    if remote and files.trust_remote_code and files.folder is not None:
        return get_class_from_dynamic_module(remote, files.folder), config
    text = config.get_text_config(decoder=True)
    for candidate in (text, config):
        if type(candidate) in MODEL_FOR_CAUSAL_LM_MAPPING:
            found = MODEL_FOR_CAUSAL_LM_MAPPING[type(candidate)]
            return (found[0] if isinstance(found, tuple) else found), candidate
    if remote:
        _check_trust(files)
    raise ModelLoadError(
        f"model_type {files.model_type!r} has no causal language model in transformers {library_version()}: aengine "
        f"generates text with decoders only"
    )


def build_skeleton(files: ModelFiles, dtype: torch.dtype, *, buffers: torch.device) -> tuple[Any, Any]:
    """Return the model with parameters on the meta device and its buffers on another, and its config.

    Raises ModelLoadError.
    """
    config = read_hf_config(files)
    register()  # this imports much of transformers: an unknown model_type is refused before
    model_class, config = _model_class(config, files)
    with _quietly(), _explained(files, "transformers can't build it"), _meta_parameters(buffers):
        try:
            model = model_class._from_config(
                config, dtype=dtype, attn_implementation=ATTENTION, experts_implementation=ATTENTION
            )
        except KeyError as error:
            if error.args != (ATTENTION,):
                raise
            name = model_class.__name__
            raise ModelLoadError(
                f"{name} of transformers can't be served: its attention does not go through AttentionInterface"
            ) from error
    for module in model.modules():
        if hasattr(module, "warn_if_padding_and_no_attention_mask"):
            module.warn_if_padding_and_no_attention_mask = _no_warning  # it would read tokens back in each step
    return model.eval().requires_grad_(False), config


def _no_warning(*args: Any, **kwargs: Any) -> None:
    pass


@contextmanager
def _meta_parameters(buffers: torch.device) -> Iterator[None]:
    """Give modules parameters without memory inside the context; their buffers are computed on ``buffers``."""
    from transformers.initialization import no_init_weights

    with no_init_weights():
        if buffers.type == "meta":
            with torch.device("meta"):
                yield
            return
        register: Callable[..., None] = nn.Module.register_parameter

        def on_meta(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
            register(self, name, param)
            if param is not None and param.device.type != "meta":
                # Memory that was not written has not been taken from the system.
                self._parameters[name] = nn.Parameter(param.detach().to("meta"), requires_grad=False)

        nn.Module.register_parameter = on_meta  # type: ignore[method-assign]
        try:
            yield
        finally:
            nn.Module.register_parameter = register  # type: ignore[method-assign]


@contextmanager
def _explained(files: ModelFiles, what: str) -> Iterator[None]:
    """Convert whatever transformers raises about a model to a ModelLoadError."""
    try:
        yield
    except ModelLoadError:
        raise
    except Exception as error:
        raise ModelLoadError(f"model_type {files.model_type!r}: {what}: {type(error).__name__}: {error}") from error


@contextmanager
def _quietly() -> Iterator[None]:
    """Have transformers log nothing but errors within the block."""
    logger = logging.getLogger("transformers")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)
