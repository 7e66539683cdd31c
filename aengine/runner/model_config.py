"""A model's shape, read and checked once; everything else takes it from here.

`ModelConfig` has what the runner needs of any model, and what dense decoders have in common. A family's own config, in
its file, adds what only its layers need, and has the rules by which a config.json is read (`ConfigReader` helps).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import torch

from ..checkpoint.early_checks import sizes_that
from ..checkpoint.gguf_config import GGUF_KEYS
from ..checkpoint.value_reader import ValueReader
from ..errors import ModelLoadError
from ..kernels.activation import Activation
from .kv_spec import FullKV, LayerKV, SharedKV, StateKV, WindowKV
from .rope import RopeConfig

ACTIVATIONS: Mapping[str, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
}


class NotNativeError(ModelLoadError):
    """A setting of a native family that only transformers' code has."""


_MOST_HEAD_DIM = 1 << 16
_ATTENTION_TYPES = ("full_attention", "sliding_attention")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """A dense decoder. Sizes in elements; one entry of ``sliding_windows`` a layer, in tokens, None: no window.
    ``ropes``: the rotary embeddings that there are; each `AttentionLayer` has the index of its own."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    max_position_embeddings: int
    tie_word_embeddings: bool
    ropes: tuple[RopeConfig, ...]
    sliding_windows: tuple[int | None, ...]
    checkpoint_dtype: str  # "float32", "bfloat16", "float16", or "" when the checkpoint does not say
    rope_of_layers: tuple[int | None, ...] = ()  # index into ``ropes``; None: no rotary positions; (): all the first
    activation: Activation = "silu"  # activation of the gates of feed-forward layers
    attention_bias: bool = False  # q, k, v and the output of attention have biases
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    logit_scale: float = 1.0
    logit_softcap: float = 0.0  # c in c * tanh(logits / c); 0: no cap
    num_experts: int = 0  # experts of each mixture; 0: the model has no mixtures
    num_ranks: int = 1  # ranks that divide heads and inner features: all sizes here are those of one rank
    kv_copies: int = 1  # number of ranks that have the same key-value heads
    divides_experts: bool = False  # each rank has whole experts, instead of a part of every expert

    divided: ClassVar[tuple[str, ...]] = ("num_heads", "intermediate_size")
    """The fields that are divided among ranks, numbers or `Divisible`, the key-value heads apart."""
    expert_sizes: ClassVar[tuple[str, ...]] = ()
    """Those of them that are of a mixture's experts alone."""
    has_tape: ClassVar[bool] = True
    """Whether a CPU's compiled kernels have all that the family's layers do, so that it runs as a `TapeModel`."""

    @classmethod
    def from_hf(cls, hf: Mapping[str, Any]) -> Self:
        """Read the content of a config.json by the family's rules.

        Raises ModelLoadError naming the key that is missing or unsupported.
        """
        raise NotImplementedError(f"{cls.__name__} is no family's config")

    def check_device(self, device: torch.device, dtype: torch.dtype) -> None:
        """Raise ModelLoadError if the model can't be computed there in ``dtype``, a library is missing, say."""

    def of_rank(self, num_ranks: int, *, divides_experts: bool = False, num_replicas: int = 1) -> Self:
        """Return the config as each of ``num_ranks`` has it, which share each layer (`TensorGroup`).

        ``divides_experts``: the setting ``enable_expert_parallel``; without a mixture of experts it changes nothing.
        ``num_replicas``: of so many ranks each, among all of which the experts are divided.

        Raises ModelLoadError: something does not divide; the message says which numbers of ranks would do.
        """
        experts = divides_experts and self.num_experts > 0
        if num_ranks == 1 and not (experts and num_replicas > 1):
            return self
        if experts and num_replicas > 1 and self.num_experts % (num_ranks * num_replicas):
            raise ModelLoadError(
                f"enable_expert_parallel: the model has {self.num_experts} experts in a layer, which can't be "
                f"divided by tensor_parallel_size={num_ranks} x data_parallel_size={num_replicas}: use sizes whose "
                f"product divides it, or leave enable_expert_parallel out"
            )
        found = self._divided(num_ranks, experts)
        if isinstance(found, str):
            usable = sizes_that(lambda size: not isinstance(self._divided(size, experts), str), self.num_heads)
            raise ModelLoadError(f"tensor_parallel_size={num_ranks}: {found}; it can be {usable}")
        return found

    def _divided(self, num_ranks: int, divides_experts: bool) -> Self | str:
        """Return the config of a rank, or a text that says what does not divide."""
        changes: dict[str, Any] = {"divides_experts": divides_experts}
        if divides_experts and self.num_experts % num_ranks:
            return f"num_experts={self.num_experts} can't be divided by it"
        for name in self.divided:
            if divides_experts and name in self.expert_sizes:
                continue
            value = getattr(self, name)
            if isinstance(value, Divisible):
                own = value.divided(num_ranks)
            else:
                own = None if value % num_ranks else value // num_ranks
            if own is None:
                return f"{name}={value} can't be divided by it"
            changes[name] = own
        heads = self.num_kv_heads
        if heads % num_ranks and num_ranks % heads:
            return f"num_kv_heads={heads} neither divides it nor is divided by it"
        changes["num_kv_heads"] = max(1, heads // num_ranks)
        return replace(self, **changes, num_ranks=num_ranks, kv_copies=max(1, num_ranks // heads))

    @property
    def implementation(self) -> str:
        """Whose code computes it: "native" or "transformers"."""
        return "native"

    @property
    def why_not_native(self) -> str:
        """The reason why it is not native; "" if it is."""
        return ""

    @property
    def kv_layers(self) -> tuple[LayerKV, ...]:
        """The specs of what each layer keeps of a sequence."""
        heads = self.num_kv_heads, self.head_dim
        return tuple(WindowKV(*heads, window) if window else FullKV(*heads) for window in self.sliding_windows)

    @property
    def rope_border(self) -> int | None:
        """The length in tokens beyond which a request's rotary embedding is another one; None: there is no such."""
        return min((long.border for rope in self.ropes if (long := rope.long()) is not None), default=None)

    @property
    def query_heads(self) -> tuple[int, ...]:
        """Query heads of each layer."""
        return (self.num_heads,) * self.num_layers

    @property
    def head_shapes(self) -> tuple[tuple[int, int, int], ...]:
        """(query heads, key-value heads, their size), the kinds of attention that the layers have between them."""
        kept = self.kv_layers
        own = (kept[kv.layer] if isinstance(kv, SharedKV) else kv for kv in kept)
        pairs = zip(self.query_heads, own, strict=True)
        shapes = ((n, kv.num_kv_heads, kv.head_dim) for n, kv in pairs if isinstance(kv, FullKV | WindowKV))
        return tuple(dict.fromkeys(shapes))

    @property
    def q_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim


@dataclass(frozen=True, slots=True)
class AttendingLayers:
    """What a KV cache needs to know of the layers of several models, those of one behind those of another."""

    kv_layers: tuple[LayerKV, ...]
    query_heads: tuple[int, ...]
    ropes: tuple[RopeConfig, ...]

    @classmethod
    def of(cls, *configs: ModelConfig) -> Self:
        kept: list[LayerKV] = []
        for config in configs:
            first = len(kept)
            kept += (SharedKV(first + kv.layer) if isinstance(kv, SharedKV) else kv for kv in config.kv_layers)
        heads = tuple(count for config in configs for count in config.query_heads)
        return cls(tuple(kept), heads, tuple(rope for config in configs for rope in config.ropes))

    def with_ahead(self, num_ahead: int) -> Self:
        """Return what is kept where a step may guess so many tokens of a sequence; see `StateKV.with_ahead`."""
        layers = (kv.with_ahead(num_ahead) if isinstance(kv, StateKV) else kv for kv in self.kv_layers)
        return replace(self, kv_layers=tuple(layers))


class Divisible(ABC):
    """Sizes that are divided among ranks together."""

    @abstractmethod
    def divided(self, num_ranks: int) -> Self | None:
        """Return the sizes of one rank; None: they don't divide."""


class ConfigReader(ValueReader):
    """The content of a config.json. Whatever is missing or not supported raises a ModelLoadError that names the key."""

    def __init__(self, hf: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> None:
        """``defaults``: what transformers' class of the model takes for a key that is not there at all."""
        values = {**(defaults or {}), **hf}
        if hf.get("rope_scaling") and not hf.get("rope_parameters"):  # the older name of the same
            values.pop("rope_parameters", None)
        super().__init__(values, str(hf.get("gguf_file") or "config.json"))

    def error(self, key: str, problem: str) -> ModelLoadError:
        """See `ValueReader`. Of a GGUF file the error names the metadata that the setting was made from."""
        arch, own = self.raw("gguf_architecture"), GGUF_KEYS.get(key)
        if not arch or own is None:
            return super().error(key, problem)
        return ModelLoadError(f"{self._where}: {arch}.{own}={self.raw(key)!r:.80} {problem}")

    @property
    def is_gguf(self) -> bool:
        """Whether the settings were made from a GGUF's metadata."""
        return bool(self.raw("gguf_architecture"))

    def num_experts(self, default: int = 0) -> int:
        """Return the number of experts a layer, by either of its names; 0: there are none."""
        found = [self.integer_or_none(key, least=0) for key in ("num_local_experts", "num_experts")]
        return default if found == [None, None] else found[0] or found[1] or 0

    def experts_per_token(self, num_experts: int) -> int:
        """Return how many of ``num_experts`` experts a token takes."""
        top_k = self.integer("num_experts_per_tok")
        if top_k > num_experts:
            raise self.error("num_experts_per_tok", f"is more than the {num_experts} experts of a layer")
        return top_k

    def decoder(
        self, *, interleaved_rope: bool = False, has_experts: bool = False, norm_eps: str = "rms_norm_eps"
    ) -> dict[str, Any]:
        """Return the fields of `ModelConfig` that all dense decoders spell alike; ``sliding_windows`` is the family's.

        ``norm_eps``: the key of the norms' epsilon.
        """
        heads, hidden = self.integer("num_attention_heads"), self.integer("hidden_size")
        kv_heads = self.integer("num_key_value_heads", default=heads)
        head_dim = self.integer("head_dim", default=hidden // heads or None)
        max_positions = self.integer("max_position_embeddings")
        if heads % kv_heads:
            raise self.error("num_key_value_heads", f"does not divide the {heads} attention heads")
        if head_dim > _MOST_HEAD_DIM:
            raise ModelLoadError(f"{self._where}: heads of {head_dim} elements: {_MOST_HEAD_DIM} at most")
        if head_dim % 2:
            raise ModelLoadError(f"{self._where}: head_dim={head_dim} is odd, and rotary embeddings rotate pairs")
        for key in ("num_local_experts", "num_experts"):
            if self.raw(key) and not has_experts:
                raise self.error(key, "this model's family has no mixtures of experts")
        return {
            "model_type": self.text("model_type"),
            "vocab_size": self.integer("vocab_size"),
            "hidden_size": hidden,
            "intermediate_size": self.integer("intermediate_size"),
            "num_layers": self.integer("num_hidden_layers"),
            "num_heads": heads,
            "num_kv_heads": kv_heads,
            "head_dim": head_dim,
            "rms_norm_eps": self.number(norm_eps, 1e-6, least=0),
            "max_position_embeddings": max_positions,
            "tie_word_embeddings": self.flag("tie_word_embeddings"),
            "ropes": self.ropes(head_dim, max_positions, interleaved_rope),
            "activation": self._activation(),
            "checkpoint_dtype": self.dtype(),
        }

    def dtype(self) -> str:
        """Return the checkpoint's dtype; "": it does not say."""
        return (self.text("dtype") or self.text("torch_dtype")).removeprefix("torch.")

    def _activation(self) -> Activation:
        """Return the activation that ``hidden_activation`` or ``hidden_act`` names, in transformers' spelling."""
        key = "hidden_activation" if self.text("hidden_activation") else "hidden_act"
        name = self.text(key) or "silu"
        if name not in ACTIVATIONS:
            raise ModelLoadError(
                f"config.json: {key}={name!r:.80} is not supported; these are: {', '.join(ACTIVATIONS)}"
            )
        return ACTIVATIONS[name]

    def layer_types(self, known: Sequence[str]) -> list[str]:
        """Return the type of each layer, of the ``known`` ones; []: config.json does not say."""
        types, layers = self.texts("layer_types"), self.integer("num_hidden_layers")
        if types and (len(types) != layers or not set(types) <= set(known)):
            raise self.error("layer_types", f"must name one of {', '.join(known)} for each of {layers} layers")
        return types

    def layer_set(self, key: str) -> frozenset[int]:
        """Return the numbers of layers that a list names."""
        return frozenset(self.integers(key))

    def window(self, *, is_on: bool = True) -> int | None:
        """Return ``sliding_window`` in tokens; None: there is none, or it is not ``is_on``."""
        window = self.integer_or_none("sliding_window", least=0)
        return window or None if is_on else None

    def windows(self, window: int | None, first_layer: int = 0) -> tuple[int | None, ...]:
        """Return each layer's window: by ``layer_types``, else ``window`` from ``first_layer`` on; None: no window."""
        layers = self.integer("num_hidden_layers")
        if window is not None and window >= self.integer("max_position_embeddings"):
            window = None
        if window is not None and (kinds := self.layer_types(_ATTENTION_TYPES)):
            return tuple(window if kind == "sliding_attention" else None for kind in kinds)
        return tuple(window if layer >= first_layer else None for layer in range(layers))

    def rope_of_layers(self) -> tuple[int, ...]:
        """Return each layer's index into ``ropes``: by ``layer_types``, where each type has its own rope."""
        kinds = list(self._rope_parameters())
        types = self.layer_types(_ATTENTION_TYPES)
        if len(kinds) == 1 or not types:
            return (0,) * self.integer("num_hidden_layers")
        if not set(types) <= set(kinds):
            raise self.error("rope_parameters", f"has no parameters for layers of {', '.join(set(types) - set(kinds))}")
        return tuple(kinds.index(kind) for kind in types)

    def _rope_parameters(self) -> dict[str, Mapping[str, Any]]:
        """Return the parameters of each type of layers, or, by "", of all."""
        given = self.mapping("rope_parameters") or self.mapping("rope_scaling")
        if given and all(parameters is None or isinstance(parameters, Mapping) for parameters in given.values()):
            return {kind: parameters or {} for kind, parameters in given.items()}
        return {"": given}

    def ropes(self, head_dim: int, max_positions: int, interleaved: bool) -> tuple[RopeConfig, ...]:
        """Read the rotary embeddings: one for each type of layers that has its own. Raises ModelLoadError."""
        return tuple(
            RopeConfig.read(
                self._with_original(parameters),
                head_dim=head_dim,
                max_positions=max_positions,
                theta=self.number("rope_theta", 10000.0, above=0),
                partial=self.number("partial_rotary_factor", 1.0, above=0),
                interleaved=interleaved,
            )
            for parameters in self._rope_parameters().values()
        )

    def _with_original(self, parameters: Mapping[str, Any]) -> Mapping[str, Any]:
        """Add the original context to rope parameters: Phi's releases have it beside them."""
        key = "original_max_position_embeddings"
        return {**parameters, key: self.raw(key)} if self.raw(key) else parameters
