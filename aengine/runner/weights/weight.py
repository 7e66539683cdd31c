"""`Weight`: a matrix that multiplies, in whatever format it is kept; and what such a format is.

A format is one file: it names the tensors of the checkpoint that make a matrix [out_features, in_features], and makes a
`Weight` of them, which multiplies. `Weight` has the products of a layer as verbs, together with what comes
right before and after them. A format that can do both in one kernel overrides the verb; others multiply, and the rest
is done beside.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from itertools import pairwise
from threading import Lock
from typing import NamedTuple, Protocol, TypeAlias

import torch
from torch import Tensor

from ...errors import InternalError
from ...kernels.activation import Activation, Gated, act_and_mul, activate, computed
from ...kernels.expert_types import ExpertGate, ExpertPlan
from ...kernels.grouped_codes import CodeKind
from ...kernels.rms_norm import Norm, add_rms_norm, rms_norm
from ...kernels.short_conv import TokenConv, conv_of_tokens

__all__ = [
    "RANDOM_EXPONENTS",
    "RANDOM_WEIGHT",
    "Drawn",
    "ExpertWeights",
    "Fault",
    "JoinedTensors",
    "MultipliedExperts",
    "Norm",
    "NotMultiplied",
    "OrdersDiffer",
    "StoredTensor",
    "Weight",
    "WeightFormat",
    "WeightsBelow",
    "put_into",
    "random_scales",
]


RANDOM_WEIGHT = 0.04
"""The largest of random weights: activations keep their size through any number of layers."""

Drawn: TypeAlias = tuple[float, float] | Callable[[], Tensor]
"""What a tensor of random weights has: numbers between two, rounded to bfloat16, or what a function makes."""

Fault: TypeAlias = Callable[[Tensor], str]
"""Says what is wrong with a tensor as it comes, in words that follow its name; "": nothing."""


RANDOM_EXPONENTS = (119.0, 121.0)
"""Random scales of FP4 codes, whose largest is 6, are 2^(exponent - 127) with an exponent between these."""


def random_scales(largest_code: float) -> tuple[float, float]:
    """Return scales by which codes become numbers as large as other random weights."""
    most = RANDOM_WEIGHT / largest_code
    return most / 2, most


class Weight(ABC):
    """A matrix [out_features, in_features] with its bias, if it has one."""

    __slots__ = ("bias",)

    bias: Tensor | None  # [out_features]

    @abstractmethod
    def multiply(self, x: Tensor) -> Tensor:
        """[n, out_features] in x's dtype, for x [n, in_features]; the bias included."""

    def copy_from(self, other: Weight) -> None:
        """Take over what another weight of the same format and shape is, into the memory that this one has: captured
        graphs hold its addresses. What is no tensor, such as a matrix that a library has packed, is replaced."""
        assert type(self) is type(other)
        for name in (name for cls in type(self).__mro__ for name in getattr(cls, "__slots__", ())):
            mine, new = getattr(self, name), getattr(other, name)
            if isinstance(mine, Tensor | Weight):
                mine.copy_(new) if isinstance(mine, Tensor) else mine.copy_from(new)
            else:
                setattr(self, name, new)

    def rows(self, ids: Tensor, scale: float) -> Tensor:
        """``scale`` times the matrix' rows ``ids`` (int64 [n]) as numbers, [n, in_features], a new tensor."""
        raise InternalError(f"{type(self).__name__} gives no rows")

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        """The product by norm(x): [n, out_features] in x's dtype or ``out_dtype``, a new tensor."""
        return self.multiply(rms_norm(x, norm.weight, norm.eps)).to(out_dtype or x.dtype)

    def gated_after_norm(self, x: Tensor, norm: Norm, activation: Activation = "silu") -> Tensor | Gated:
        """activation(gate) * up, [n, out_features / 2]: gate and up are the halves of the product by norm(x)."""
        return self.gated(rms_norm(x, norm.weight, norm.eps), activation)

    def conv_after_norm(self, x: Tensor, norm: Norm, conv: TokenConv) -> Tensor:
        """c * convolution(b * z), [n, out_features / 3]: b, c and z are the thirds of the product by norm(x)."""
        return conv_of_tokens(self.after_norm(x, norm), *conv)

    def gated(self, x: Tensor, activation: Activation = "silu") -> Tensor:
        """See `gated_after_norm`: of the product by x."""
        return act_and_mul(self.multiply(x), activation)

    def activated(self, x: Tensor, activation: Activation) -> Tensor:
        """activation(the product by x), [n, out_features]."""
        return activate(self.multiply(x), activation)

    def above(self, others: Sequence[Weight]) -> Weight:
        """Return this weight and others, below each other, as one."""
        return WeightsBelow([self, *others])

    def beside(self, others: Sequence[Weight]) -> MultipliedExperts | None:
        """Return this weight and others, each an expert's, as what multiplies them together; None: there is none."""
        return None

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Add the product by x to ``residual`` [n, out_features], in place."""
        residual.add_(self.multiply(x))

    def add_gated_to(self, residual: Tensor, gated: Gated) -> None:
        """See `add_to`: of a gated activation that is yet to be computed."""
        self.add_to(residual, computed(gated))

    def add_normed_to(self, residual: Tensor, x: Tensor, norm: Norm) -> None:
        """Add norm(the product by x) to ``residual`` [n, out_features], in place."""
        add_rms_norm(residual, self.multiply(x), norm.weight, norm.eps)

    def add_scaled_to(self, residual: Tensor, x: Tensor, scale: float) -> None:
        """Add ``scale`` times the product by x to ``residual`` [n, out_features], in place."""
        if x.dtype == torch.float16 and self.bias is None and abs(scale) < 1:  # the product may pass its range
            residual.add_(self.multiply(x * scale))
        else:
            residual.add_(self.multiply(x), alpha=scale)


class WeightsBelow(Weight):
    """Weights of several formats below each other, as one: each multiplies by itself."""

    __slots__ = ("parts",)

    def __init__(self, parts: Sequence[Weight]) -> None:
        self.parts = parts
        self.bias = parts[0].bias  # only whether there is one is asked: each part adds its own

    def copy_from(self, other: Weight) -> None:
        assert isinstance(other, WeightsBelow)
        for mine, new in zip(self.parts, other.parts, strict=True):
            mine.copy_from(new)

    def multiply(self, x: Tensor) -> Tensor:
        return torch.cat([part.multiply(x) for part in self.parts], 1)

    def after_norm(self, x: Tensor, norm: Norm, out_dtype: torch.dtype | None = None) -> Tensor:
        return torch.cat([part.after_norm(x, norm, out_dtype) for part in self.parts], 1)


def put_into(owner: object, name: str, tensor: Tensor) -> None:
    """Set an attribute; where the owner has that tensor already, from an earlier load, copy into its memory."""
    before = getattr(owner, name, None)
    if before is None:
        setattr(owner, name, tensor)
    else:
        before.copy_(tensor)


class MultipliedExperts(Protocol):
    """What multiplies the matrices of all experts by a plan of `ExpertSlots`; its verbs are of `ExpertWeights`."""

    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor: ...

    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None: ...


class ExpertWeights(ABC):
    """A matrix [out_features, in_features] an expert, with its bias, if it has one."""

    __slots__ = ()

    @property
    def can_group(self) -> bool:
        """Whether torch's grouped product takes the matrices."""
        return False

    @property
    def kind(self) -> CodeKind | None:
        """Kind of the codes that a GPU multiplies, if these have a scale a group."""
        return None

    @property
    def is_compiled(self) -> bool:
        """Whether a CPU's compiled kernels multiply all experts together, by a plan of `ExpertSlots`."""
        return False

    @abstractmethod
    def room(self, expert: int, suffix: str, rows: slice) -> Tensor:
        """Memory on the device for rows of one of an expert's tensors, to be filled; from any thread."""

    @abstractmethod
    def finish(self, expert: int) -> None:
        """Note that all rows of an expert's tensors have been filled. From any thread."""

    @abstractmethod
    def multiply(self, x: Tensor, plan: ExpertPlan) -> Tensor:
        """[pairs, out_features]: the product by x [n, in_features]. For plans that neither group pairs nor have
        `ExpertSlots`: the rows are in the order of the pairs."""

    @abstractmethod
    def gated_after_norm(self, x: Tensor, norm: Norm, plan: ExpertPlan, gate: ExpertGate) -> Tensor:
        """[pairs, out_features / 2]: the gated activation of the product by norm(x), for x [n, in_features].

        The order of the pairs is for the plan and `add_to` to know.
        """

    @abstractmethod
    def add_to(self, residual: Tensor, hidden: Tensor, plan: ExpertPlan) -> None:
        """Add each token's weighted sum of the products by ``hidden`` [pairs, in_features] to ``residual``
        [n, out_features], in place."""


class NotMultiplied(ValueError):
    """The tensors are right, and this device can't multiply them in their format; the message says what helps."""


class OrdersDiffer(ValueError):
    """The tensors are right, and of matrices that have other orders of columns: each makes a weight of its own."""


class StoredTensor(NamedTuple):
    """A tensor of those in which a checkpoint keeps a matrix."""

    suffix: str  # end of its name, after the matrix's: "weight", "bias", "weight_scale"
    shape: tuple[int, ...]
    dtype: torch.dtype  # see `Place`
    num_parameters: int  # parameters of the model that it stands for; 0 for a scale
    out_dim: int | None = 0  # dimension of the matrix's output features; None: it has none
    in_dim: int | None = None  # dimension of the matrix's input features; None: it has none
    kept: torch.dtype | None = None  # dtype in which its parameters are kept in memory, if that is another one
    turned: bool = False  # the checkpoint has it as [in, out], memory as [out, in]
    drawn: Drawn | None = None  # if weights are random; None: small numbers, or any codes of the dtype
    fault: Fault | None = None
    block: tuple[int | None, int | None] = (None, None)  # output, input features of an element; the last may have fewer

    def cuts_block(self, out_features: int) -> bool:
        """Return whether the last element is of fewer output features than the others, for a matrix of so many."""
        return self.block[0] is not None and out_features % self.block[0] != 0


class WeightFormat(Protocol):
    """A format of matrices, in the checkpoint and in memory."""

    @property
    def name(self) -> str:
        """Name for messages, such as "bfloat16"."""

    def tensors(self, out_features: int, in_features: int, has_bias: bool) -> list[StoredTensor]:
        """Return the tensors in which the checkpoint keeps one matrix. Raises ValueError: it can't keep one of this
        shape."""

    def make(self, tensors: Mapping[str, Tensor]) -> Weight:
        """Make a weight. Raises ValueError: the tensors are none.

        Args:
            tensors: those of the matrix by suffix, as `tensors` names them, on the model's device, and on a CPU of any
                dtype of numbers. They are the format's to keep. Of matrices that are multiplied together (q, k, v;
                gate, up), those of each suffix are one, below each other.
        """

    def make_experts(self, num_experts: int, tensors: Sequence[StoredTensor], device: torch.device) -> ExpertWeights:
        """Make the weights of a mixture's experts, which are yet to be filled. ``tensors``: of each, as `make` takes
        them."""


class JoinedTensors:
    """Tensors of several matrices by suffix, those of each suffix below each other in one.

    Its memory is allocated when the first of them comes, and each is copied to its rows: no tensor waits for another in
    memory of its own.
    """

    def __init__(self, device: torch.device) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._ends: dict[str, list[int]] = {}  # where the rows of each matrix end
        self._device = device
        self._lock = Lock()  # several threads may load

    def add(self, suffix: str, shape: tuple[int, ...], dtype: torch.dtype) -> Callable[[], Tensor]:
        """Add rows below those of the suffix so far; returns what gives their memory, once all have been added."""
        ends = self._ends.setdefault(suffix, [0])
        ends.append(ends[-1] + shape[0])
        return partial(self._room, suffix, ends[-2], shape, dtype)

    def of_parts(self) -> list[dict[str, Tensor]]:
        """Return the tensors of each matrix, once all have come."""
        split = {
            suffix: tensor.split([b - a for a, b in pairwise(self._ends[suffix])])
            for suffix, tensor in self.tensors.items()
        }
        return [dict(zip(split, part, strict=True)) for part in zip(*split.values(), strict=True)]

    def _room(self, suffix: str, begin: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        with self._lock:
            if suffix not in self.tensors:
                whole = (self._ends[suffix][-1], *shape[1:])
                self.tensors[suffix] = torch.empty(whole, dtype=dtype, device=self._device)
        return self.tensors[suffix][begin : begin + shape[0]]
