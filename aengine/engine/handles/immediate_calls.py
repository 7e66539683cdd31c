"""`ImmediateCalls`: the calls of an engine that return at once, the same for code that awaits and code that blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..threads.loop_ownership import not_copied

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import NoReturn

    from ...telemetry.listeners import RequestListener
    from ...telemetry.metrics import Statistics
    from ..tokenizer_view import TokenizerView
    from .handle import Handle


class ImmediateCalls:
    """Calls that need no waiting, of an engine held by a handle."""

    _handle: Handle

    def __repr__(self) -> str:
        return repr(self._handle)

    def __reduce__(self) -> NoReturn:
        raise not_copied(self)

    @property
    def state(self) -> str:
        """ "new", "starting", "running", "paused", "asleep", "draining", "failed" or "closed"; in a fork of its process
        "closed"."""
        return self._handle.state

    @property
    def is_sleeping(self) -> bool:
        """Whether ``state`` is "asleep": since a call of `sleep`, or after ``sleep_after``."""
        return self.state == "asleep"

    def abort(self, request_id: str) -> bool:
        """End a request by its id; its stream ends with FinishReason.ABORT. Returns whether it was running."""
        return self._handle.abort(request_id)

    def abort_all(self) -> int:
        """End all requests; their streams end with FinishReason.ABORT. Returns how many there were."""
        return self._handle.abort_all()

    # -- what there is to know

    def add_listener(self, listener: RequestListener) -> Callable[[], None]:
        """Tell ``listener`` of every request that is accepted from now on: its beginning, first token and end. On the
        engine's loop; with ``own_thread=True`` in its thread.

        Returns a function that removes it; it still hears the ends of the requests that it knows of. Before the start,
        too, and over all lives of the engine. From any thread.
        """
        return self._handle.listeners.add(listener)

    def statistics(self) -> Statistics:
        """Return the engine's counters at this moment. May be called from any thread, with or without a loop."""
        return self._handle.statistics()

    def describe(self) -> dict[str, Any]:
        """Return what runs: vocab_size, max_model_len, num_blocks, block_size, device, dtype, weight_format, pid, ...;
        ``activations``: what they are as matrices multiply them ("int16 beside codes, else float32", say);
        ``weights``: what each kind of tensors is in the first rank's memory, its bytes, and those that a step reads;
        ``sampling_defaults``: what the checkpoint's generation_config.json says for requests that don't;
        ``speculation``: the method that the setting names, and ``proposer`` what it has weights of. With
        ``data_parallel_size`` above 1 it is of the first replica, and ``replicas`` has that of each."""
        return self._handle.describe()

    @property
    def tokenizer(self) -> TokenizerView:
        """The model's tokenizer: encode, decode, count, render, which block; on an event loop take `async_tokenizer`.
        Raises InvalidRequestError with skip_tokenizer=True."""
        return self._handle.tokenizer
