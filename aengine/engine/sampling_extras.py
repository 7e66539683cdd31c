"""What a request's sampling parameters become in its message, where they are lists: a feature's columns, by its name.

The features that read them are in runner/sampling/features/.
"""

from __future__ import annotations

from ..ipc.messages import Extras, float32, int32
from ..params import SamplingParams

__all__ = ["extras_of"]


def extras_of(params: SamplingParams) -> Extras:
    """Return the extras of a request with these parameters, which are checked."""
    extras: Extras = {}
    if params.logit_bias:
        bias = params.logit_bias
        extras["logit_bias"] = [int32(bias.keys()).tobytes(), float32(bias.values()).tobytes()]
    return extras
