"""What stands on top of a decoder: the output matrix that predicts tokens, a head that classifies texts, or nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch

from ...checkpoint.pooling import labels_of
from ...checkpoint.safetensors_files import stored_names
from ...checkpoint.source import ModelSource
from ...checkpoint.value_reader import ValueReader
from ...errors import ModelLoadError
from ..models.causal_lm import CausalLM
from ..pooling.vectors import DenseLayer, VectorLayers
from ..weights.sources.gguf_source import read_gguf_tensor
from ..weights.sources.safetensors_source import read_tensor

_SCORE = "score.weight"


@dataclass(frozen=True, slots=True)
class DecoderHead:
    """``predicts``: it has an output matrix; ``labels``: the classes of a head on the last token, of which the
    checkpoint has no output matrix; ``is_untied``: the output matrix is no copy of the embedding, whatever config.json
    says."""

    predicts: bool
    labels: tuple[str, ...] = ()
    is_untied: bool = False

    @classmethod
    def of(cls, checkpoint: ModelSource) -> Self:
        labels = labels_of(checkpoint.hf_config)
        if labels or checkpoint.format != "safetensors":
            return cls(predicts=not labels, labels=labels)
        names = stored_names(Path(checkpoint.path))
        is_base = not any(name.startswith("model.") or "lm_head" in name.split(".") for name in names)
        is_tied = ValueReader(checkpoint.hf_config).flag("tie_word_embeddings")
        return cls(
            predicts=is_tied or not is_base or "embed_tokens.weight" not in names,
            is_untied=checkpoint.hf_config.get("tie_word_embeddings") is not False and _differ(checkpoint.path, names),
        )

    def settings(self, hf_config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the settings by which the model is built: its output matrix is wanted only where there is one."""
        if self.predicts and not self.is_untied:
            return dict(hf_config)
        return {**hf_config, "tie_word_embeddings": not self.predicts}

    def vectors(self, checkpoint: ModelSource, hidden_size: int, device: torch.device) -> VectorLayers:
        """Return what gives the logits of the classes. Raises ModelLoadError: the head is not as it should be."""
        shape = (len(self.labels), hidden_size)
        if checkpoint.format == "dummy":
            weight = torch.zeros(shape)
        elif checkpoint.format == "gguf":
            yes, no = read_gguf_tensor(checkpoint.path, "cls.output.weight").split(1)
            weight = yes - no
        else:
            weight = read_tensor(Path(checkpoint.path), _SCORE).float()
        if weight.shape != shape:
            wanted, found = list(shape), list(weight.shape)
            raise ModelLoadError(f"{checkpoint.path}: {_SCORE} is {found}, and by config.json it is {wanted}")
        return VectorLayers("last", [DenseLayer(weight.to(device), None, lambda x: x)])

    def offer(self, model: CausalLM, vectors: VectorLayers | None) -> dict[str, Any]:
        """Return what the engine is told of the model's tasks."""
        if self.labels:
            asks = len(self.labels) == 1 and getattr(model, "reranks_by_yes", False)
            return {"tasks": ["classify"], "labels": list(self.labels), "asks_yes_no": asks}
        tasks = ["generate"] if self.predicts else []
        if vectors is None:
            return {"tasks": tasks}
        return {
            "tasks": [*tasks, "embed"],
            "pooling": vectors.mode,
            "embedding_size": vectors.size(model.config.hidden_size),
        }


def _differ(path: str, names: Sequence[str]) -> bool:
    """Return whether there is an output matrix beside the embedding that has other values: then transformers takes
    it."""
    pair = [[name for name in names if name.endswith(end)] for end in ("embed_tokens.weight", "lm_head.weight")]
    if any(len(found) != 1 for found in pair):
        return False
    for rows in (64, None):  # most that differ do so in the first rows
        table, head = (read_tensor(Path(path), name, rows) for [name] in pair)
        if table.shape != head.shape or table.dtype != head.dtype:
            return False  # as of a quantised one
        if not torch.equal(table, head):
            return True
    return False
