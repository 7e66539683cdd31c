"""`Reservations`: calls that are being prepared (a chat's prompt and grammar) and are not made yet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

__all__ = ["Reservation", "Reservations"]


@dataclass(slots=True, eq=False)
class Reservation:
    """The place of one of them in the queue."""

    request_id: str | None
    is_aborted: bool = False  # it is to be aborted as soon as it is made


class Reservations:
    """Those of one engine. ``on_end`` is called for each that is made, or given up."""

    def __init__(self, on_end: Callable[[], None]) -> None:
        self._open: set[Reservation] = set()
        self._on_end = on_end

    def __len__(self) -> int:
        return len(self._open)

    @contextmanager
    def hold(self, request_id: str | None) -> Iterator[Reservation]:
        reservation = Reservation(request_id)
        self._open.add(reservation)
        try:
            yield reservation
        finally:
            self._open.discard(reservation)
            self._on_end()

    def has(self, request_id: str) -> bool:
        """Whether there is one of that id, which is not aborted. From any thread."""
        return any(one.request_id == request_id and not one.is_aborted for one in list(self._open))

    def abort(self, request_id: str) -> bool:
        """Whether there was one of that id."""
        return self._abort([one for one in self._open if one.request_id == request_id]) > 0

    def abort_all(self) -> int:
        """Returns how many there were."""
        return self._abort(list(self._open))

    def _abort(self, reservations: list[Reservation]) -> int:
        due = [one for one in reservations if not one.is_aborted]
        for reservation in due:
            reservation.is_aborted = True
        return len(due)
