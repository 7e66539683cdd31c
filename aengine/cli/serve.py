"""``aengine serve``: the engine behind HTTP."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import logging
import os
import socket
import tomllib
from collections.abc import Awaitable
from typing import TYPE_CHECKING, Any, TypeVar

from ..async_llm import AsyncLLM
from ..config import EngineConfig, server_admin_key, server_api_key
from ..errors import EngineError, InvalidRequestError
from .engine_options import NOT_HERE, add_engine_options, engine_config, whole_number
from .listening import bind_tcp, is_loopback, url_of
from .progress import tell

if TYPE_CHECKING:
    from starlette.applications import Starlette

    from ..server.serve import Served, StopSignals

T = TypeVar("T")

logger = logging.getLogger("aengine.server")

_LOG_LEVELS = ("critical", "error", "warning", "info", "debug")


def add_serve_arguments(command: argparse.ArgumentParser) -> None:
    """Add the options of `aengine serve` to a parser."""
    command.add_argument(
        "other_models",
        metavar="MODEL",
        nargs="*",
        help="further ones, each loaded when it is asked for; a file *.toml has several, with settings of their own",
    )
    group = command.add_argument_group("server")
    group.add_argument("--host", default="127.0.0.1", help="the address; 0.0.0.0: all of this machine (127.0.0.1)")
    group.add_argument(
        "--port", type=whole_number("a port: 0 to 65535", 0, 65535), default=8000, help="0: any that is free (8000)"
    )
    group.add_argument("--uds", metavar="PATH", default=None, help="a Unix socket, in place of host and port")
    group.add_argument(
        "--uds-mode",
        metavar="MODE",
        type=_mode,
        default=0o600,
        help="who may use that socket, as of chmod: 660 for a proxy of its group, 666 for all users (600)",
    )
    group.add_argument(
        "--served-model-name",
        metavar="NAME",
        nargs="+",
        default=None,
        help="under which requests may ask for the model; the first is that of answers (MODEL, of a path its end)",
    )
    group.add_argument(
        "--max-body-bytes",
        type=whole_number("a number of bytes, at least 1", 1),
        default=32 << 20,
        help="larger requests are refused (32 MiB)",
    )
    _add_access(group)
    group.add_argument("--root-path", default="", help="the path under which a proxy shows it")
    group.add_argument(
        "--grace",
        type=_seconds,
        default=15.0,
        metavar="SECONDS",
        help="on SIGTERM or Ctrl-C running requests may end for so long (15)",
    )
    group.add_argument(
        "--workers",
        type=whole_number("a number of processes: 1 to 256", 1, 256),
        default=0,
        metavar="N",
        help="so many processes for HTTP and JSON, beside the engine's; the model is loaded once (none: all in one)",
    )
    group.add_argument(
        "--most-awake",
        type=whole_number("a number of models, at least 1", 1),
        default=None,
        metavar="N",
        help="of several models, so many are awake at once, at most (as many as fit into memory)",
    )
    group.add_argument(
        "--wait-for-model",
        type=_seconds,
        default=60.0,
        metavar="SECONDS",
        help="a request waits so long for others' requests to make room for its model, then it is 503 (60)",
    )
    group.add_argument("--log-level", choices=_LOG_LEVELS, default="info", help="(info)")
    group.add_argument("--log-format", choices=("text", "json"), default="text", help="json: an object a line (text)")
    group.add_argument("--no-access-log", action="store_true", help="no line for each request")
    group.add_argument("--no-probe-log", action="store_true", help="none for /health, /livez, /readyz and /metrics")
    group.add_argument(
        "--report-every",
        type=_seconds,
        default=10.0,
        metavar="SECONDS",
        help="log tokens/s, running and waiting requests and the KV cache, while there are any; 0: never (10)",
    )
    add_engine_options(command, shows_all=True)


def _add_access(group: Any) -> None:
    """Add the options that say who may do what."""
    group.add_argument(
        "--api-key",
        metavar="KEY",
        action="append",
        default=[],
        help="clients must show it; may be repeated. Other users see it in the list of processes: rather set "
        "AENGINE_API_KEY in the environment",
    )
    about = "TOML with keys, each of a tenant, and with the setting tenants"
    group.add_argument("--api-keys-file", metavar="FILE", default=None, help=about)
    group.add_argument(
        "--admin-key",
        metavar="KEY",
        default=None,
        help="requests that change the engine must show it; without, there are none. Rather AENGINE_ADMIN_KEY in the "
        "environment",
    )
    group.add_argument(
        "--lora-dir", metavar="DIR", default=None, help="the folder whose adapters such requests may load"
    )
    group.add_argument(
        "--weights-dir", metavar="DIR", default=None, help="the folder whose checkpoints may replace the weights"
    )
    group.add_argument(
        "--allow-origin",
        metavar="ORIGIN",
        action="append",
        default=[],
        help="browser pages of this origin, such as https://chat.example, may call it; *: of all; may be repeated",
    )
    group.add_argument(
        "--allow-host",
        metavar="NAME",
        action="append",
        default=[],
        help="a name of this server. On a loopback address without a key it answers requests for localhost and IP "
        "addresses only, and for these; *: for all; may be repeated",
    )
    group.add_argument(
        "--max-keep",
        type=_seconds,
        default=3600.0,
        metavar="SECONDS",
        help="the KV of sessions is kept for so long at most, whatever clients ask (3600); 0: not at all",
    )


def _mode(text: str) -> int:
    try:
        mode = int(text, 8)
    except ValueError:
        mode = -1
    if not 0 <= mode <= 0o777:
        raise argparse.ArgumentTypeError(f"{text!r} is no mode of a file, such as 660")
    return mode


def _seconds(text: str) -> float:
    try:
        number = float(text)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds, 0 or more")
    return number


async def serve(args: argparse.Namespace) -> int:
    """Serve until a signal comes. Returns 0 when it was asked to stop, 1 when it was told to a second time."""
    try:
        from ..server.logs import log_to_stderr
        from ..server.serve import stop_signals
    except ImportError as error:
        raise EngineError(f"aengine serve needs {error.name}: pip install 'aengine-llm[server]'") from None
    log_to_stderr(**_log_options(args))
    args.quiet = args.quiet or args.log_format == "json"  # what is printed otherwise would not be JSON
    engine = _engine(args)
    with stop_signals() as stop:
        serving = asyncio.create_task(_serve(args, engine, stop))
        if await _first(serving, stop.insisted.wait()):
            serving.result()
            return 0
        engine.terminate()
        await _cancelled(serving)
        return 1


def _engine(args: argparse.Namespace) -> Served:
    """Make the engine, or the engines, of the command line. Raises InvalidRequestError."""
    from ..server import AwakeModels

    if args.api_keys_file is not None and not hasattr(args, "engine_tenants"):
        args.engine_tenants = args.api_keys_file
    given = [args.model, *args.other_models]
    if given == [args.model] and not args.model.endswith(".toml"):
        engine = AsyncLLM(engine_config(args))
        _trace(engine, args.served_model_name)
        return engine
    for option, is_given in (("--workers", args.workers), ("--served-model-name", args.served_model_name)):
        if is_given:
            raise InvalidRequestError(f"{option} is for one model that is given by its name")
    engines: dict[str, AsyncLLM] = {}
    for one in given:
        configs = _configs_in(args, one) if one.endswith(".toml") else [(None, engine_config(args, one))]
        for name, config in configs:
            name = name or config.model_name
            if name in engines:
                raise InvalidRequestError(f"two models have the name {name!r}: requests could not tell them apart")
            engines[name] = AsyncLLM(config)
            _trace(engines[name], [name])
    return AwakeModels(engines, most_awake=args.most_awake, wait=args.wait_for_model)


def _configs_in(args: argparse.Namespace, path: str) -> list[tuple[str, EngineConfig]]:
    """Return the names and settings of the models in a file of TOML, a table each. Raises InvalidRequestError."""
    try:
        with open(path, "rb") as file:
            tables = tomllib.load(file)
    except (OSError, ValueError, RecursionError) as error:
        raise InvalidRequestError(f"the models in {path} can't be read: {error}", param="model") from error
    configs = []
    for name, table in tables.items():
        where = f"{path}: [{name}]"
        if not isinstance(table, dict) or "model" not in table:
            raise InvalidRequestError(f"{where} must be a table with model = and the settings of that model")
        if strange := table.keys() - (EngineConfig.__annotations__.keys() - NOT_HERE | {"model"}):
            raise InvalidRequestError(f"{where}: there is no such setting in a file: {', '.join(sorted(strange))}")
        try:
            configs.append((name, engine_config(args, **table)))
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{where}: {error}", param=error.param) from error
    return configs


def _trace(engine: AsyncLLM, names: list[str] | None) -> None:
    """Trace and measure requests for OpenTelemetry's global providers, if it is installed: without an SDK they record
    nothing, and ``opentelemetry-instrument aengine serve ...`` sets one up."""
    try:
        from ..telemetry.opentelemetry import instrument
    except ImportError:
        return
    instrument(engine, model_name=names[0] if names else None)


async def _serve(args: argparse.Namespace, engine: Served, stop: StopSignals) -> None:
    from ..remote.unix_socket import bind_unix
    from ..server import AwakeModels
    from ..server.app import create_app
    from ..server.serve import BACKLOG

    with contextlib.ExitStack() as at_end:
        count = max(1, args.workers)
        if args.uds is None:
            listeners = bind_tcp(args.host, args.port, count)
        else:
            listeners = [bind_unix(args.uds, args.uds_mode)] * count
            at_end.callback(_remove, args.uds)
        for listener in listeners:
            at_end.callback(listener.close)
        options = app_options(args, listeners[0])
        app = create_app(engine, **options)  # made first, so that wrong options are reported before the model loads
        # The port is opened when the engine can serve: a client that waits for it finds a model behind it.
        try:
            starting = asyncio.create_task(engine.start())
            if not await _first(starting, stop.asked.wait()):
                await _cancelled(starting)
                return
            starting.result()
            for listener in listeners:
                listener.listen(BACKLOG)
            names = list(engine.engines) if isinstance(engine, AwakeModels) else [args.model]
            who = f"{', '.join(names)} {'are' if len(names) > 1 else 'is'} served at"
            if args.log_format == "json":
                logger.info("%s %s", who, url_of(listeners[0]))
            elif not args.quiet:
                tell(f"aengine: {who} {url_of(listeners[0])} (Ctrl-C stops)")
            await _serve_engine(args, engine, (app, options), listeners, stop.asked)
        finally:
            await _close(engine, stop, args.grace)


async def _close(engine: Served, stop: StopSignals, grace: float) -> None:
    """Close the engine; at the end of the grace, or at once if that was asked for, kill what is left of it."""
    if stop.insisted.is_set():
        engine.terminate()
        return
    deadline = stop.asked_at + grace if stop.asked.is_set() else None
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout_at(deadline):
            await engine.aclose()


async def _serve_engine(
    args: argparse.Namespace,
    engine: Served,
    app: tuple[Starlette, dict[str, Any]],
    listeners: list[socket.socket],
    stop: asyncio.Event,
) -> None:
    """Serve the engine, by this process or by app processes. ``app``: the application, and the options of those that
    app processes make for themselves."""
    from ..server.logs import reported
    from ..server.processes import serve_processes
    from ..server.serve import keep_loaded_objects, serve_app
    from ..server.several.awake import AwakeModels

    server: dict[str, Any] = {"root_path": args.root_path, "access_log": not args.no_access_log}
    keep_loaded_objects()
    async with reported(engine, args.report_every):
        if args.workers:
            assert not isinstance(engine, AwakeModels), "`_engine` has refused it"
            settings = {"app": app[1], "server": server, "log": _log_options(args)}
            await serve_processes(engine, listeners, settings, stop=stop, grace=args.grace)
        else:
            await serve_app(app[0], engine, listeners[0], stop=stop, grace=args.grace, **server)


def app_options(args: argparse.Namespace, listener: socket.socket) -> dict[str, Any]:
    """Return the keyword arguments of `create_app` that the command line gives, for an application at this address."""
    api_keys = args.api_key or [key for key in (server_api_key(),) if key]
    is_bare = not (api_keys or args.api_keys_file) and is_loopback(listener)  # only the address keeps other users out
    return {
        "model_names": args.served_model_name,
        "api_keys": api_keys,
        "api_keys_file": args.api_keys_file,
        "admin_key": args.admin_key or server_admin_key(),
        "lora_dir": args.lora_dir,
        "weights_dir": args.weights_dir,
        "max_body_bytes": args.max_body_bytes,
        "max_keep": args.max_keep,
        "allow_origins": args.allow_origin,
        "allow_hosts": args.allow_host if args.allow_host or is_bare else None,
        **({"max_stored_responses": 0} if args.workers else {}),  # the next request may reach another process
    }


def _log_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of `log_to_stderr`."""
    level = "debug" if args.verbose else args.log_level
    return {"level": level, "form": args.log_format, "with_probes": not args.no_probe_log}


async def _first(task: asyncio.Task[T], other: Awaitable[object]) -> bool:
    """Wait until ``task`` or ``other`` is done. Returns whether the task is."""
    waiting = asyncio.ensure_future(other)
    try:
        await asyncio.wait([task, waiting], return_when=asyncio.FIRST_COMPLETED)
    finally:
        waiting.cancel()
    return task.done()


async def _cancelled(task: asyncio.Task[Any]) -> None:
    task.cancel()
    await asyncio.wait([task])


def _remove(path: str) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path)
