"""`load_proposer`: what guesses tokens in a worker with weights of its own, by the method that the settings name."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from ...checkpoint.source import ModelSource, resolve_model
from ...checkpoint.value_reader import read_json
from ...config import EngineConfig
from ...errors import ModelLoadError
from ...limits.speculation import NEEDS_MODEL
from ..distributed.group import TensorGroup
from ..kv_spec import FullKV, SharedKV, StateKV, WindowKV
from ..model_config import ModelConfig
from ..models import build_model, read_config
from ..models.causal_lm import CausalLM
from ..models.heads import DraftHead, OnePassHead, WholeModel, build_head, method_of
from ..platforms.platform import Platform
from ..speculation.model_proposer import LAG, ModelProposerSource
from ..speculation.one_pass import OnePassSource
from ..speculation.proposer import FINDS_IN_ROWS, ProposerSource
from ..weights.formats import WeightFormats, choose_formats
from ..weights.sources.loader import Progress, check_layers, load_weights, stored_shapes, tensor_names
from .estimate import gguf_matrices
from .heads import DecoderHead

logger = logging.getLogger("aengine.runner")


class Target(NamedTuple):
    """The loaded model for which tokens are guessed."""

    model: CausalLM
    checkpoint: ModelSource
    platform: Platform
    dtype: str  # as the platform has resolved the setting
    group: TensorGroup


def load_proposer(config: EngineConfig, target: Target, progress: Progress) -> ProposerSource:
    """Load what the setting ``speculation`` names. Raises ModelLoadError: it does not fit the model, or can't be
    loaded."""
    method = config.speculation_settings.method
    if method not in NEEDS_MODEL:  # the host proposes, or nobody, or the rows are looked at
        return FINDS_IN_ROWS
    if any(isinstance(kv, StateKV) and not kv.with_ahead(1).num_ahead for kv in target.model.config.kv_layers):
        raise ModelLoadError(
            f"speculation={method!r}: {target.model.config.model_type!r} keeps states, out of which tokens that were "
            f"guessed wrong can't be taken again: leave speculation at 'none'"
        )
    return (_load_draft_model if method == "draft_model" else _load_head)(config, target, progress)


def find_proposer(config: EngineConfig) -> None:
    """Look for the checkpoint that ``speculation`` names, before weights are read. Raises ModelLoadError: it is not
    there, or there are stages, over which no proposer with weights goes."""
    method = config.speculation_settings.method
    if method in NEEDS_MODEL and config.pipeline_parallel_size > 1:
        raise ModelLoadError(
            f"speculation={method!r} with pipeline_parallel_size={config.pipeline_parallel_size}: the last stage "
            f"samples, and the first has the rows' tokens: use tensor_parallel_size, or speculation='suffix'"
        )
    if config.speculation_settings.model:
        _checkpoint_of(config)


def _checkpoint_of(config: EngineConfig) -> tuple[EngineConfig, ModelSource]:
    """Return the settings by which the named checkpoint is loaded, and what it is."""
    asked = {"revision": None, "gguf_file": None, "speculation": "none", "quantization": "auto"}
    own = config.replace(model=config.speculation_settings.model, **asked)
    try:
        return own, resolve_model(own)
    except ModelLoadError as error:
        raise ModelLoadError(f"speculation={config.speculation_settings.method!r}: {error}") from error


def _load_draft_model(config: EngineConfig, target: Target, progress: Progress) -> ProposerSource:
    """Load a whole model, as the engine's own is loaded."""
    own, source = _checkpoint_of(config)
    head = DecoderHead.of(source)
    folder = source.path if source.format != "gguf" else None
    hf = head.settings(source.hf_config)
    model_config = read_config(hf, folder=folder, trust_remote_code=config.trust_remote_code)
    if model_config.implementation == "native":
        check_layers(source, model_config.num_layers)
    _check_vocabularies(source, target.checkpoint, model_config.vocab_size, target.model.config.vocab_size)
    _check_layers(model_config)
    model_config = model_config.of_rank(target.group.size)
    formats = _formats(own, source, hf, model_config, target)
    model = build_model(model_config, formats, target.group)
    num_bytes = load_weights(model, source, config.seed, progress, target.platform.memory).own_bytes
    logger.info("a draft model on %s: %s, %d bytes", target.platform.device, source.path, num_bytes)
    described = {"method": "draft_model", "model": source.path, "weight_format": formats.name}
    return _source(WholeModel(model), config, target, num_bytes, described)


def _load_head(config: EngineConfig, target: Target, progress: Progress) -> ProposerSource:
    """Load a head on the model's states: of a checkpoint of its own, or of the model's."""
    chosen, own, source = config.speculation_settings, config, target.checkpoint
    if chosen.model:
        own, source = _checkpoint_of(config)
    stored = stored_shapes(source)
    with _named(source.path if chosen.model else ""):
        method = method_of(source.hf_config, stored or ())
    if method != chosen.method:
        how = f'{{"method": "{method}", "model": {chosen.model!r}}}'
        raise ModelLoadError(
            f"speculation={chosen.method!r}: {source.path} has a head of another method: use speculation={how}"
        )
    formats = _formats(own, source, source.hf_config, target.model.config, target)
    with _named(source.path if chosen.model else ""):
        head: Any = build_head(source.hf_config, stored, target.model, formats, target.group)
    if isinstance(head, OnePassHead) and chosen.tokens > head.most_drafts:
        raise ModelLoadError(
            f"speculation={method!r}: tokens={chosen.tokens}, and the head {source.path} drafts {head.most_drafts} at "
            f"most (block_size): use tokens={head.most_drafts}"
        )
    num_bytes = load_weights(
        head, source, config.seed, progress, target.platform.memory, is_whole=bool(chosen.model)
    ).own_bytes
    logger.info("a head on %s: %s, %d bytes", target.platform.device, source.path, num_bytes)
    described = {"method": chosen.method, "model": source.path, "weight_format": formats.name}
    return _source(head, config, target, num_bytes, described)


@contextmanager
def _named(folder: str) -> Iterator[None]:
    """Have a ModelLoadError name the folder of the head: "config.json" alone is the model's. Empty: it is."""
    try:
        yield
    except ModelLoadError as error:
        raise (ModelLoadError(f"{folder}: {error}") if folder else error) from None


def _formats(
    config: EngineConfig, source: ModelSource, hf: dict[str, Any], model_config: ModelConfig, target: Target
) -> WeightFormats:
    platform = target.platform
    return choose_formats(
        target.dtype,
        platform.device,
        hf,
        target.model.weights.formats.policy,
        gguf_matrices(config, source, model_config, platform),
        stored=tensor_names(source),
        dequantises=config.on_unsupported_format == "dequantise",
        is_compiled=model_config.implementation == "native" and bool(platform.compiled_types),
        folder=source.path,
    )


def _source(
    head: DraftHead, config: EngineConfig, target: Target, num_bytes: int, described: dict[str, Any]
) -> ModelProposerSource:
    return (OnePassSource if isinstance(head, OnePassHead) else ModelProposerSource)(
        head,
        target.model,
        target.group,
        num_tokens=config.speculation_settings.tokens,
        max_num_seqs=config.max_num_seqs,
        num_bytes=num_bytes,
        described=described | {"num_tokens": config.speculation_settings.tokens},
    )


def _check_layers(config: ModelConfig) -> None:
    for kv in config.kv_layers:
        if isinstance(kv, StateKV) or (isinstance(kv, WindowKV) and kv.window < 2 * LAG):
            what = "states" if isinstance(kv, StateKV) else "short windows"
            raise ModelLoadError(
                f"the draft model, {config.model_type!r}, has layers with {what}: take one with full attention, or "
                f"windows of {2 * LAG} tokens or more"
            )
        assert isinstance(kv, FullKV | WindowKV | SharedKV)


def _check_vocabularies(source: ModelSource, target: ModelSource, num_own: int, num_target: int) -> None:
    """Raise ModelLoadError unless a token means the same to both. Tables may be padded to different sizes where files
    of the same tokenizer are beside both."""
    own, others = _tokens_of(source), _tokens_of(target)
    if own is not None and others is not None and own != others:
        raise ModelLoadError(
            f"the draft model {source.path} has another tokenizer than {target.path}: a token would mean another text; "
            f"take a model of the same family"
        )
    if num_own != num_target and (own is None or others is None):
        raise ModelLoadError(
            f"the draft model {source.path} has {num_own} tokens, and {target.path} has {num_target}: take a model of "
            f"the same vocabulary"
        )


def _tokens_of(source: ModelSource) -> Any:
    """Return the tokens by id, or what stands for them; None: there is no file that says them."""
    path = Path(source.path)
    if source.format == "gguf":
        from ...checkpoint.gguf_file import GgufFile

        with GgufFile(path) as file:
            tokens = file.metadata.get("tokenizer.ggml.tokens")
        return None if tokens is None else {token: i for i, token in enumerate(tokens)}
    if not (path / "tokenizer.json").is_file():
        return None
    vocabulary = read_json(path / "tokenizer.json").get("model", {}).get("vocab")
    if isinstance(vocabulary, list):  # a unigram tokenizer has pairs of token and score
        return {pair[0]: i for i, pair in enumerate(vocabulary)}
    return vocabulary
