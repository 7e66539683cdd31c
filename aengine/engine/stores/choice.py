"""Which store a tier of the setting ``kv_tiers`` is kept in."""

from __future__ import annotations

from pkgutil import resolve_name

from ...errors import AEngineError, ModelLoadError
from ...limits.kv_tiers import DiskTier, StoreTier
from ...limits.registry import KV_STORES, registered, target_of
from .disk import DiskStore
from .store import KVStore


def open_store(tier: DiskTier | StoreTier) -> KVStore:
    """Return the store of a tier. Blocking. Raises ModelLoadError: it can't be made, and no waiting would help."""
    if isinstance(tier, DiskTier):
        return DiskStore(str(tier.path), tier.num_bytes)
    target = tier.name if ":" in tier.name else target_of(KV_STORES, tier.name)
    if target is None:
        known = ", ".join(map(repr, registered(KV_STORES)))
        raise ModelLoadError(f"kv_tiers: there is no store {tier.name!r}; there are {known}")
    try:
        store: KVStore = resolve_name(target)(**tier.options)
        for method in ("query", "load", "save", "close"):
            if not callable(getattr(store, method, None)):
                raise TypeError(f"it has no method {method}")
    except AEngineError:
        raise
    except (Exception, SystemExit) as error:  # whatever an import or a constructor may raise
        raise ModelLoadError(f"kv_tiers: {tier!r} can't be used: {error!r:.300}") from error
    return store
