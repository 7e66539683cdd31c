"""The old place of `aengine.engine.structured.parts`, for one version."""

import warnings

from aengine.engine.structured.parts import *  # noqa: F403

warnings.warn("aengine.structured.parts has moved to aengine.engine.structured.parts", DeprecationWarning, stacklevel=2)
