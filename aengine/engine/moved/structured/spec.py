"""The old place of `aengine.engine.structured.spec`, for one version."""

import warnings

from aengine.engine.structured.spec import *  # noqa: F403

warnings.warn("aengine.structured.spec has moved to aengine.engine.structured.spec", DeprecationWarning, stacklevel=2)
