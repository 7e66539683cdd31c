"""What turns hidden states into an embedding: a pooling, and the dense layers that the checkpoint has after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from ...checkpoint.pooling import PoolingConfig
from ...checkpoint.value_reader import read_json
from ...errors import ModelLoadError

_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "ReLU": torch.relu,
    "GELU": F.gelu,
    "Sigmoid": torch.sigmoid,
}


class DenseLayer:
    """activation(x W^T + b), in float32."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Callable[[Tensor], Tensor]) -> None:
        self.weight = weight  # [out_features, in_features]
        self._bias = bias
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return self._activation(F.linear(x, self.weight, self._bias))


class VectorLayers:
    """``mode``: which hidden states of a text make its vector, "mean", "cls" (the first) or "last"."""

    def __init__(self, mode: str, dense: Sequence[DenseLayer] = ()) -> None:
        self.mode = mode
        self._dense = dense

    def size(self, hidden_size: int) -> int:
        """Return how many elements a vector has."""
        return self._dense[-1].weight.shape[0] if self._dense else hidden_size

    def finish(self, pooled: Tensor) -> Tensor:
        """Return float32 [n, size] for [n, hidden_size]."""
        pooled = pooled.float()
        for layer in self._dense:
            pooled = layer(pooled)
        return pooled


def load_vector_layers(mode: str, config: PoolingConfig, folder: str, device: torch.device) -> VectorLayers:
    """Read the dense layers. Raises ModelLoadError: one can't be read, or has an activation that aengine lacks."""
    return VectorLayers(mode, [_load_dense(Path(folder) / path, device) for path in config.dense])


def _load_dense(folder: Path, device: torch.device) -> DenseLayer:
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    config = read_json(folder / "config.json")
    name = str(config.get("activation_function", "torch.nn.modules.activation.Tanh")).rpartition(".")[2]
    if name not in _ACTIVATIONS:
        known = ", ".join(_ACTIVATIONS)
        raise ModelLoadError(f"{folder}: activation_function {name!r:.80} is not supported; these are: {known}")
    path = folder / "model.safetensors"
    if not path.is_file():
        raise ModelLoadError(f"{path} is not there: a dense layer's weights must be in that format")
    try:
        tensors = load_file(path)
        weight, bias = tensors["linear.weight"].float(), tensors.get("linear.bias")
    except (SafetensorError, OSError, KeyError) as error:
        raise ModelLoadError(f"{path} can't be read: {error!r}") from error
    return DenseLayer(weight.to(device), None if bias is None else bias.float().to(device), _ACTIVATIONS[name])
