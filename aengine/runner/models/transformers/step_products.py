"""Products of transformers' linear layers with what a `StepRows` puts around their weights.

Such a weight must be multiplied by all tokens of a step, together and once. Which layers do that is seen in a run over
two sequences: one that is called for each sequence, for each head, for the tokens of an expert, or not at all stays
transformers'.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from torch import Tensor, nn

from ...distributed.shares import Share
from ...weights.plain import PlainWeight
from ...weights.step_rows import StepRows
from ...weights.weight import Weight
from .fused import FusedLayer


def wrap_products(
    model: nn.Module, fused: Sequence[FusedLayer], step_rows: StepRows, run: Callable[[], object], num_tokens: int
) -> None:
    """Put what ``step_rows`` has around the weights of the model's linear layers.

    Args:
        fused: the layers that are computed by ours
        run: runs the model over ``num_tokens`` tokens of two sequences
    """
    names = {module: name for name, module in model.named_modules() if type(module) is nn.Linear}
    calls: dict[nn.Linear, list[int]] = {}

    def note(module: nn.Linear, args: tuple[Tensor, ...], out: Tensor) -> None:
        calls.setdefault(module, []).append(args[0].numel() // module.in_features)

    def wrapped(weight: Weight, matrices: Sequence[nn.Linear]) -> Weight:
        parts = {names[matrix]: (Share(matrix.out_features),) for matrix in matrices}
        return step_rows.wrap(parts, (Share(matrices[0].in_features),))(weight)

    handles = [module.register_forward_hook(note) for module in names]
    try:
        run()
    finally:
        for handle in handles:
            handle.remove()
    for layer in fused:
        layer.wrap(wrapped)
    for module, counts in calls.items():
        plain = PlainWeight(module.weight.detach(), None if module.bias is None else module.bias.detach())
        weight = wrapped(plain, [module]) if counts == [num_tokens] else plain
        if weight is not plain:
            module.forward = partial(_product, weight)  # type: ignore[method-assign]


def _product(weight: Weight, x: Tensor) -> Tensor:
    return weight.multiply(x.reshape(-1, x.shape[-1])).view(*x.shape[:-1], -1)
