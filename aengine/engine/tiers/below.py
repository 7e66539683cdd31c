"""What the host's memory asks of stores below it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..scheduler.kv_elsewhere import KeptPages
from ..scheduler.request import Request


@dataclass(slots=True, eq=False)
class Search:
    """What is sought for requests that wait for it."""

    requests: list[Request] = field(default_factory=list)


class NoStores:
    """What there is beyond the host's memory. Here: nothing."""

    def seek(self, request: Request, least_tokens: int) -> Search | None:
        """Return what a request has to wait for, if it may bring that many tokens; None: nothing."""
        return None

    def forget(self) -> None:
        """Find nothing any more that was saved until now."""

    def held(self) -> Iterable[list[int]]:
        """Return the places that calls of stores hold, as tables."""
        return ()

    def counts(self) -> Sequence[KeptPages]:
        """See `KVElsewhere`, of each store."""
        return ()

    def close(self) -> None:
        """End: nothing will be asked any more."""
