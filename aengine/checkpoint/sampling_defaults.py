"""`SamplingDefaults`: a model's recommended sampling parameters, for requests that leave them unset."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from ..errors import InvalidRequestError
from ..params import DEFAULT_TYPES, SamplingParams

logger = logging.getLogger("aengine")

_NAMES = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty")


class SamplingDefaults:
    """The sampling parameters of a generation_config.json; ``values`` by the names of `SamplingParams`.

    Its lengths (max_new_tokens) and ``do_sample`` are ignored.
    """

    def __init__(self, generation_config: Mapping[str, Any]) -> None:
        """Read the model's defaults. A value that can't be used is left out, with a warning."""
        self.values: dict[str, float] = {}
        for name in _NAMES:
            value = generation_config.get(name)
            if value is None:
                continue
            try:
                self.values[name] = getattr(SamplingParams(**{name: value}), name)
            except InvalidRequestError as error:
                logger.warning("generation_config.json of the model: %s; it is left out", error)

    def applied(self, params: SamplingParams) -> SamplingParams:
        """Return the parameters with the model's values where the caller gave none."""
        if not self.values:
            return params
        missing = {name: value for name, value in self.values.items() if type(getattr(params, name)) in DEFAULT_TYPES}
        return params.replace(**missing) if missing else params
