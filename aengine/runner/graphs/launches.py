"""How the parts of a step are launched: as graphs, or op by op."""

from __future__ import annotations

from typing import Any

from ...limits.graphs import GRAPH_MODES


class Launches:
    """What is noted of the step that is being queued: of its layers; of its head and sampling."""

    def __init__(self) -> None:
        self._by_graph = self._op_by_op = False
        self._num_paddings = 0

    @classmethod
    def of(cls, *graphs: Any) -> Launches:
        """Return what all of these note their launches in; None: there is no such one."""
        launches = cls()
        for one in graphs:
            if one is not None:
                one.launches = launches
        return launches

    def note(self, *, is_graph: bool, num_paddings: int = 0) -> None:
        """Note that a part is queued, with so many rows or tokens that pad it."""
        self._by_graph |= is_graph
        self._op_by_op |= not is_graph
        self._num_paddings += num_paddings

    def take(self) -> tuple[int, int]:
        """Return the place in `GRAPH_MODES` of how the step was launched ("FULL": all parts were graphs; "PIECEWISE":
        some), and what padded it. The next step begins."""
        mode = "NONE" if not self._by_graph else "PIECEWISE" if self._op_by_op else "FULL"
        num_paddings = self._num_paddings
        self.__init__()  # type: ignore[misc]
        return GRAPH_MODES.index(mode), num_paddings
