"""The old place of `aengine.engine.structured`, for one version."""
