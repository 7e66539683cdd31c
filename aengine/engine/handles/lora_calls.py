"""`LoraCalls`: the calls of an engine that concern its adapters."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from ...errors import InvalidRequestError
from ...limits.loras import is_lora_name
from ...limits.values import is_unicode, not_valid
from ..adapters.memory import LoraMemory, LoraTensors

if TYPE_CHECKING:
    from ..adapters.registry import LoraAdapters
    from ..core import EngineCore
    from .handle import Handle


async def add_lora(core: EngineCore, name: str, source: str | LoraTensors | LoraMemory, replace: bool) -> None:
    """See `LoraCalls.add_lora`."""
    await _adapters_of(core).add(name, source, replace=replace)


async def remove_lora(core: EngineCore, name: str) -> None:
    """See `LoraCalls.remove_lora`."""
    _adapters_of(core).remove(name)


async def pin_lora(core: EngineCore, name: str) -> None:
    """See `LoraCalls.pin_lora`."""
    await _adapters_of(core).pin(name)


async def list_loras(core: EngineCore) -> dict[str, dict[str, Any]]:
    """See `LoraCalls.list_loras`."""
    return await _adapters_of(core).listed() if core.config.num_lora_slots else {}


async def has_lora(core: EngineCore, name: str) -> bool:
    """See `LoraCalls.has_lora`."""
    return name in _adapters_of(core) if core.config.num_lora_slots else False


class LoraCalls:
    """Calls about LoRA adapters of an engine held by a handle."""

    _handle: Handle

    async def add_lora(
        self,
        name: str,
        source: str | Mapping[str, Any] | LoraMemory,
        *,
        config: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> None:
        """Let requests name another adapter. It is loaded when the first one does, or by `pin_lora`.

            tensors = peft.get_peft_model_state_dict(model)
            await engine.add_lora("policy", tensors, config=peft_config.to_dict(), replace=True)

        Args:
            name: what requests call it: ``lora=name``.
            source: its folder or hub id, in PEFT's format. The folder must stay as it is while the adapter is known.
                Or its tensors, of numpy or torch, by the names of PEFT's files: they are copied before this returns.
            config: with tensors what adapter_config.json says, of which r, lora_alpha, use_rslora and alpha_pattern
                count.
            replace: take the place of an adapter of this name. Requests that use that one end with it.

        Raises:
            InvalidRequestError: the name is in use, the engine was started without ``max_loras``, or the adapter is
                damaged, of another base model, of a larger rank than ``max_lora_rank``, or of a kind that can't be
                served; the message says what helps.
            EngineClosedError: the engine is not running.
        """
        if not is_lora_name(name):
            raise not_valid("name", name, "a text of 1 to 256 characters")
        given = _source_of(source, config)
        await self._handle.run(add_lora, name, given, replace)

    async def remove_lora(self, name: str) -> None:
        """Refuse requests that name the adapter from now on. Those that use it go on.

        Raises InvalidRequestError: there is none of this name. EngineClosedError.
        """
        await self._handle.run(remove_lora, name)

    async def pin_lora(self, name: str) -> None:
        """Load the adapter now, and keep it on the device until it is removed.

        Raises InvalidRequestError: there is none, it can't be loaded, or no place would be left for others.
        EngineClosedError.
        """
        await self._handle.run(pin_lora, name)

    async def has_lora(self, name: str) -> bool:
        """Return whether requests may name this adapter.

        Raises EngineClosedError: the engine is not running.
        """
        return is_lora_name(name) and await self._handle.run(has_lora, name)

    async def list_loras(self) -> dict[str, dict[str, Any]]:
        """Return what is known of each adapter, by name: ``path``, ``rank``, ``is_loaded`` (it is on the device, or
        comes there now), ``num_running`` and ``num_waiting``, the requests that use it and that wait for it.

        Raises EngineClosedError: the engine is not running.
        """
        return await self._handle.run(list_loras)


def _source_of(source: object, config: object) -> str | LoraTensors | LoraMemory:
    """Return where an adapter comes from. Raises InvalidRequestError: from nowhere."""
    if isinstance(source, Mapping):
        if not isinstance(config, Mapping):
            raise not_valid("config", config, "beside tensors what their adapter_config.json says: config.to_dict()")
        return LoraTensors(source, config)
    if config is not None:
        raise InvalidRequestError("config has no effect without tensors: a folder has its own", param="config")
    if isinstance(source, LoraMemory):
        return source
    if not isinstance(source, str) or not source or not is_unicode(source):
        raise not_valid("source", source, "a folder, a hub id, or tensors by name")
    return source


def _adapters_of(core: EngineCore) -> LoraAdapters:
    from ..adapters.registry import LoraAdapters

    if not isinstance(core.adapters, LoraAdapters):
        raise InvalidRequestError(
            "the engine was started without places for adapters: start it with max_loras=N or loras={...}",
            param="max_loras",
        )
    return core.adapters
