"""Requests that change the engine: the admin key, and adapters out of one folder."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aengine import InvalidRequestError
from aengine.server import create_app
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM

LOAD, UNLOAD = "/v1/load_lora_adapter", "/v1/unload_lora_adapter"
USER = {"authorization": "Bearer user"}
KEY = {"authorization": "Bearer admin"}


class Engine(FakeAsyncLLM):
    """Notes the adapters that it is given."""

    def __init__(self) -> None:
        super().__init__("a")
        self.loras: dict[str, tuple[str, bool]] = {}

    async def add_lora(self, name: str, source: Any, *, replace: bool = False) -> None:
        self.loras[name] = (source, replace)

    async def remove_lora(self, name: str) -> None:
        if self.loras.pop(name, None) is None:
            raise InvalidRequestError(f"there is no adapter {name!r}", param="name")


@asynccontextmanager
async def client_of(engine: FakeAsyncLLM, **options: Any) -> AsyncIterator[httpx.AsyncClient]:
    async with engine:
        app = create_app(engine, model_names="fake", **options)
        async with httpx.AsyncClient(transport=streaming_transport(app), base_url="http://engine") as client:
            yield client


async def admin_routes(client: httpx.AsyncClient) -> list[tuple[str, str]]:
    document = (await client.get("/openapi.json", headers=USER)).json()
    routes = [(method, path, one) for path, own in document["paths"].items() for method, one in own.items()]
    found = [(method, path) for method, path, one in routes if one.get("security") == [{"admin_key": []}]]
    assert ("post", LOAD) in found
    return found


async def test_each_such_request_needs_the_admin_key() -> None:
    async with client_of(Engine(), api_keys="user") as client:
        for method, path in await admin_routes(client):
            answer = await client.request(method, path, json={}, headers=USER)
            assert answer.status_code == 403 and "--admin-key" in answer.json()["error"]["message"], path
    async with client_of(Engine(), api_keys="user", admin_key="admin") as client:
        for method, path in await admin_routes(client):
            for headers in ({}, USER, {"x-api-key": "admim"}):
                assert (await client.request(method, path, json={}, headers=headers)).status_code == 401, path
        assert (await client.get("/v1/models", headers=KEY)).status_code == 401, "it opens nothing else"
    for key in ("", " a", "user"):
        with pytest.raises(InvalidRequestError):
            create_app(Engine(), api_keys="user", admin_key=key)


async def test_adapters_come_from_one_folder(tmp_path: Path) -> None:
    outside, inside = tmp_path / "outside", tmp_path / "adapters"
    for folder in (outside, inside / "a", inside / "linked"):
        folder.mkdir(parents=True)
        (folder / "adapter_config.json").write_text("{}")
    (inside / "b").symlink_to("a")
    (inside / "out").symlink_to(outside)
    (inside / "loop").symlink_to("loop")
    (inside / "linked" / "adapter_model.safetensors").symlink_to(outside / "adapter_config.json")
    engine = Engine()
    async with client_of(engine, admin_key="admin", lora_dir=inside) as client:

        async def load(path: str, **more: Any) -> int:
            answer = await client.post(LOAD, headers=KEY, json={"lora_name": "x", "lora_path": path} | more)
            return answer.status_code

        for path in ("a", str(inside / "a"), "b", "./a/../a"):
            assert await load(path, load_inplace=True) == 200
            assert engine.loras == {"x": (str(inside / "a"), True)}
        for path in ("out", "../outside", str(outside), "a/../../outside", "/", "linked"):
            assert await load(path) == 403, path
        for path in ("nowhere", "loop", "a/adapter_config.json", "a\0", "x" * 4000):
            assert await load(path) == 404, path
        for more in ({"lora_name": "fake"}, {"lora_name": ""}, {"lora_path": 7}, {"other": 1}):
            assert await load("a", **more) == 400, more
        answers = [await client.post(UNLOAD, headers=KEY, json={"lora_name": "x"}) for _ in range(2)]
        assert [one.status_code for one in answers] == [200, 404] and not engine.loras
    async with client_of(Engine(), admin_key="admin") as client:
        answer = await client.post(LOAD, headers=KEY, json={"lora_name": "x", "lora_path": os.fspath(inside / "a")})
        assert answer.status_code == 403 and "--lora-dir" in answer.json()["error"]["message"]


async def test_weights_come_from_one_folder(tmp_path: Path) -> None:
    """Each request is a whole update, and one that fails leaves the engine as it was."""
    (tmp_path / "weights" / "step-1").mkdir(parents=True)
    (tmp_path / "other").mkdir()

    async def post(body: Any) -> tuple[int, Any]:
        answer = await client.post("/update_weights", headers=KEY, json=body)
        return answer.status_code, answer.json().get("error", answer.json())

    async with client_of(Engine(), admin_key="admin", weights_dir=tmp_path / "weights") as client:
        assert await post({"path": "step-1"}) == (200, {"weight_version": "1"})
        given = {"weight_version": "of step 1", "mode": "wait", "clear_cache": False}
        assert await post({"path": str(tmp_path / "weights" / "step-1"), **given}) == (
            200,
            {"weight_version": "of step 1"},
        )
        assert (await post({"path": "../other"}))[1]["code"] == "outside_weights_dir"
        assert (await post({"path": "step-2"}))[0] == 404
        for wrong in ({}, {"path": ""}, {"path": "step-1", "mode": "stop"}, {"path": "step-1", "weight_version": ""}):
            assert (await post(wrong))[0] == 400, wrong
    async with client_of(engine := Engine(), admin_key="admin") as client:
        status, error = await post({"path": "step-1"})
        assert status == 403 and "--weights-dir" in error["message"]
        assert engine.state == "running"


async def test_an_update_that_fails_is_aborted(tmp_path: Path) -> None:
    class Refusing(FakeAsyncLLM):
        async def update_weights(self, *args: Any, **options: Any) -> None:
            raise InvalidRequestError("source: no checkpoint", param="source")

    async with client_of(engine := Refusing("a"), admin_key="admin", weights_dir=tmp_path) as client:
        for _ in range(2):
            answer = await client.post("/update_weights", headers=KEY, json={"path": "."})
            assert answer.status_code == 400 and answer.json()["error"]["param"] == "path"
            assert engine.state == "running"
        await engine.start_weight_update()
        answer = await client.post("/update_weights", headers=KEY, json={"path": "."})
        assert answer.status_code == 400 and "under way" in answer.text and engine.state == "paused"
        await engine.abort_weight_update()


async def test_pauses() -> None:
    engine = Engine()
    async with client_of(engine, admin_key="admin") as client:

        async def ask(path: str, body: dict[str, Any]) -> Any:
            return await client.post(path, json=body, headers=KEY)

        assert (await ask("/pause", {"mode": "keep"})).json() == {"status": "paused"} and engine.state == "paused"
        assert (await client.get("/readyz")).status_code == 503
        assert (await ask("/reset_prefix_cache", {})).json() == {"num_blocks": 0}
        assert (await ask("/resume", {})).json() == {"status": "running"} and engine.state == "running"
        paused = await client.post("/pause?mode=wait&clear_cache=true", headers=KEY)
        assert paused.json() == {"status": "paused"}
        assert (await client.get("/is_paused", headers=KEY)).json() == {"is_paused": True}
        reset = await client.post("/reset_prefix_cache?reset_running_requests=true", headers=KEY)
        assert reset.json() == {"num_blocks": 0}
        assert (await client.post("/resume", headers=KEY)).json() == {"status": "running"}
        assert (await client.get("/is_paused", headers=KEY)).json() == {"is_paused": False}
        answer = await ask("/pause", {"mode": "stop"})
        assert answer.status_code == 400 and answer.json()["error"]["param"] == "mode"
