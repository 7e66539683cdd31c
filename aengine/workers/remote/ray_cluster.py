"""`RayNodes`: room for an engine's ranks in a Ray cluster, and an actor that is their `Node` on each machine.

A pipeline stage is one bundle of a placement group: so all ranks that share a layer are on one machine. Stages are
packed on as few machines as have room. Actors and group end with the job, that is with the host's process.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from ...__version__ import __version__
from ...config import EngineConfig, ray_cluster
from ...errors import EngineClosedError, EngineError, InvalidRequestError, ModelLoadError
from ..rank import Rank
from .group import StartedNode
from .node import Node

if TYPE_CHECKING:
    from ray.util.placement_group import PlacementGroup

logger = logging.getLogger("aengine.workers")

_GROWTH_SECONDS = 10.0  # seconds that a cluster which is too small is given for nodes about to join
_START_SECONDS = 60.0  # seconds that an actor may take to start: Ray starts a Python process for it
_ANSWER_SECONDS = 5.0  # seconds that the cluster may take to accept a connection
_LOOK = 0.2  # seconds between two looks whether the start is still wanted
_connecting = threading.Lock()  # held while connecting: all replicas share a process' one connection to Ray


class RayNodes:
    """A `ClusterNodes` of the cluster that the settings name."""

    def __init__(self) -> None:
        self._group: PlacementGroup | None = None
        self._actors: list[Any] = []
        self._is_released = False
        self._lock = threading.Lock()  # guards the three attributes above

    def start(self, config: EngineConfig, ranks: Sequence[Rank], target: str, token: bytes) -> list[StartedNode]:
        """See `ClusterNodes.start`."""
        ray = _connected(config.ray_address)
        # time.monotonic() at which the start is given up; the rest of startup_timeout is for the error
        until = time.monotonic() + 0.9 * config.startup_timeout
        try:
            device = config.device
            if device == "auto":
                device = "cuda" if ray.cluster_resources().get("GPU") else "cpu"
            stages = [
                ranks[i : i + config.tensor_parallel_size] for i in range(0, len(ranks), config.tensor_parallel_size)
            ]
            need = _needs(config, device)
            self._take_room(need, len(stages), until)
            stages = [[replace(rank, device=_device_of(rank, device)) for rank in stage] for stage in stages]
            config = config.replace(device=device)
            return self._start_actors(config, stages, need, target, token, until)
        except ray.exceptions.RayError as error:
            raise EngineError(
                f"Ray could not start the workers ({type(error).__name__}: {str(error).strip()[-1000:]}): all machines "
                f"of the cluster need this aengine ({__version__}), the same Python and the same Ray"
            ) from error

    def release(self) -> None:
        """See `ClusterNodes.release`."""
        with self._lock:
            self._is_released = True
            group, self._group = self._group, None
            actors, self._actors = self._actors, []
        if group is None:
            return
        import ray
        from ray.util.placement_group import remove_placement_group

        try:
            if not ray.is_initialized():
                return
            for actor in actors:
                ray.kill(actor)
            remove_placement_group(group)
        except Exception:  # the cluster or the connection to it is gone
            logger.debug("Ray's actors could not be ended", exc_info=True)

    def _check_wanted(self) -> None:
        if self._is_released:
            raise EngineClosedError("the engine is closed")

    def _take_room(self, need: Mapping[str, float], count: int, until: float) -> None:
        """Reserve the bundles, waiting for others to give room back; for a short while also for machines that join.
        Raises ModelLoadError."""
        import ray
        from ray.util.placement_group import placement_group

        with self._lock:
            self._check_wanted()
            group = self._group = placement_group([dict(need)] * count, strategy="PACK")
        fitted = time.monotonic()  # when the existing machines would last have had room, whether taken or free
        while not group.wait(_LOOK):
            self._check_wanted()
            now = time.monotonic()
            fault = unfit(need, count, [node["Resources"] for node in ray.nodes() if node["Alive"]])
            if fault and now - fitted > _GROWTH_SECONDS:
                raise ModelLoadError(fault)
            if not fault:
                fitted = now
            if now > until:
                free = {name: ray.available_resources().get(name, 0) for name in need}
                raise ModelLoadError(
                    f"the Ray cluster had no room for {count} x {_shown(need)} within 0.9 startup_timeout; "
                    f"{_shown(free)} are free in all of it, the rest is taken by others (see `ray status`)"
                )

    def _start_actors(
        self,
        config: EngineConfig,
        stages: Sequence[Sequence[Rank]],
        need: Mapping[str, float],
        target: str,
        token: bytes,
        until: float,
    ) -> list[StartedNode]:
        import ray
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy as Placement

        make_actor = ray.remote(_NodeActor)
        pending = []
        with self._lock:
            self._check_wanted()
            group = self._group
            assert group is not None
            for index, stage in enumerate(stages):
                options: dict[str, Any] = {
                    "num_cpus": need.get("CPU", 0),
                    "num_gpus": need.get("GPU", 0),
                    "max_restarts": 0,
                    "scheduling_strategy": Placement(group, placement_group_bundle_index=index),
                }
                actor: Any = make_actor.options(**options).remote(token, sys.path)
                self._actors.append(actor)
                wire = [rank.to_wire() for rank in stage]
                pending.append(actor.start.remote(config.to_wire(), wire, target))
        until = min(until, time.monotonic() + _START_SECONDS)
        answers = [_awaited(ray, answer, until, self._check_wanted) for answer in pending]
        return [_started(stage, answer) for stage, answer in zip(stages, answers, strict=True)]


class _NodeActor:
    """An actor of Ray that runs the `Node` of its machine."""

    def __init__(self, token: bytes, search_path: list[str]) -> None:
        """``search_path``: the host's; of what this machine has of it workers import, behind their own."""
        import ray

        sys.path.extend(folder for folder in search_path if folder not in sys.path and os.path.isabs(folder))
        self._node = Node(token, ray.util.get_node_ip_address())

    def start(self, config: dict[str, Any], ranks: list[dict[str, Any]], target: str) -> dict[str, Any]:
        """See `Node.start`."""
        return self._node.start(config, ranks, target)


def _connected(address: str | None) -> Any:
    """Return the module ``ray``, connected to a cluster. Blocking. Raises InvalidRequestError, EngineError."""
    try:
        import ray
    except ImportError as error:
        raise InvalidRequestError(
            f"executor='ray' needs Ray ({error}): pip install ray, here and on all machines of the cluster",
            param="executor",
        ) from error
    with _connecting:
        if ray.is_initialized():
            return ray
        address = address or ray_cluster()
        try:
            _check_answers(address)
            # In this thread Ray leaves the host's signal handlers alone.
            ray.init(address=address, configure_logging=False, log_to_driver=False)
        except Exception as error:
            raise EngineError(
                f"no Ray cluster can be reached at {address!r} ({str(error).strip()[:500]}): start one by `ray start "
                f"--head` on one machine and `ray start --address=...` on the others, and name it by ray_address or "
                f"$RAY_ADDRESS, as 'host:6379'"
            ) from error
    return ray


def _check_answers(address: str) -> None:
    """Raise OSError or ValueError unless something answers there: Ray itself would try for minutes."""
    if "://" in address:
        raise ValueError("a machine of the cluster must run this program: the host connects to the others")
    host, colon, port = address.rpartition(":")
    if colon:
        socket.create_connection((host, int(port)), timeout=_ANSWER_SECONDS).close()


def _needs(config: EngineConfig, device: str) -> dict[str, float]:
    """Return the resources that Ray is asked for, for the workers of one pipeline stage."""
    if device == "cpu":
        return {"CPU": float(config.tensor_parallel_size * (config.num_threads or 1))}
    return {"GPU": float(config.tensor_parallel_size)}


def _device_of(rank: Rank, device: str) -> str:
    """Return the rank's device, counted among the GPUs of its stage: Ray shows each stage its own alone."""
    return device if device == "cpu" else f"{device}:{rank.tp_rank}"


def unfit(need: Mapping[str, float], count: int, nodes: Sequence[Mapping[str, float]]) -> str:
    """Return why machines with these resources, if free, can't hold ``count`` bundles; "" if they can."""
    room = sum(min(int(node.get(name, 0) // amount) for name, amount in need.items()) for node in nodes)
    if room >= count:
        return ""
    has = "; ".join(_shown({name: node.get(name, 0) for name in need}) for node in nodes) or "none at all"
    cure = "lower tensor_parallel_size" if room == 0 else "lower pipeline_parallel_size or data_parallel_size"
    threads = ", or num_threads" if "CPU" in need else ""
    return (
        f"the Ray cluster has no room for {count} x {_shown(need)}, each on one machine (a pipeline stage: "
        f"tensor_parallel_size ranks that share layers); its machines have: {has}. Add machines, or {cure}{threads}"
    )


def _shown(resources: Mapping[str, float]) -> str:
    return ", ".join(f"{amount:g} {name}" for name, amount in resources.items())


def _awaited(ray: Any, answer: Any, until: float, check_wanted: Callable[[], None]) -> dict[str, Any]:
    """Return the answer of an actor. Raises EngineError when it takes too long, and what Ray raises."""
    while True:
        check_wanted()
        try:
            result: dict[str, Any] = ray.get(answer, timeout=_LOOK)
            return result
        except ray.exceptions.GetTimeoutError:
            if time.monotonic() > until:
                raise EngineError(
                    f"Ray has not started the workers within {_START_SECONDS:g} s: a machine of the cluster hangs or "
                    f"has just gone (`ray status` lists them)"
                ) from None


def _started(ranks: Sequence[Rank], answer: Mapping[str, Any]) -> StartedNode:
    """Return the node that started. Raises EngineError if it says that it failed, or has another version."""
    if answer["version"] != __version__:
        raise EngineError(
            f"a machine of the Ray cluster has aengine {answer['version']}, and this one {__version__}: install "
            f"the same"
        )
    if "error" in answer:
        raise EngineError(f"workers could not be started on another machine: {answer['error']}")
    return StartedNode(ranks, answer["address"], answer["port"], answer["meeting_port"], answer["places"])
