"""Keys of tenants: whose requests they are, what each may have, and that nobody finds another's prefixes."""

from __future__ import annotations

import asyncio
import hashlib
import json
import logging
import os
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from aengine import InvalidRequestError, Tenant
from aengine.server import create_app
from aengine.server.admin import key_file
from aengine.server.admin.key_file import KeyFile
from aengine.server.in_process import streaming_transport
from aengine.testing import FakeAsyncLLM

FILE = f"""
[[keys]]
key = "sk-acme"
tenant = "acme"

[[keys]]
sha256 = "{hashlib.sha256(b"sk-other").hexdigest()}"
tenant = "other"

[[keys]]
key = "sk-operator"

[tenants.acme]
weight = 2
[tenants.other]
tokens_per_minute = 60
"""
LONG = "a b c d e f g h " * 40


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


def written(tmp_path: Path, content: str = FILE, mode: int = 0o600) -> Path:
    file = tmp_path / "keys.toml"
    file.write_text(content)
    file.chmod(mode)
    return file


@asynccontextmanager
async def serving(file: Path, **settings: Any) -> AsyncIterator[tuple[httpx.AsyncClient, FakeAsyncLLM]]:
    keys = settings.pop("api_keys", None)
    async with FakeAsyncLLM("abc", tenants=str(file), **settings) as engine:
        app = create_app(engine, api_keys=keys, api_keys_file=file, admin_key="sk-admin")
        async with httpx.AsyncClient(transport=streaming_transport(app), base_url="http://engine") as client:
            yield client, engine


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "fake", "prompt": LONG, "max_tokens": 2},
    "/v1/chat/completions": {"model": "fake", "messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
    "/v1/responses": {"model": "fake", "input": LONG},
    "/v1/messages": {"model": "fake", "messages": [{"role": "user", "content": LONG}], "max_tokens": 2},
}


async def ask(client: httpx.AsyncClient, key: str, path: str = "/v1/completions", **more: Any) -> httpx.Response:
    return await client.post(path, json=BODIES[path] | more, headers=bearer(key))


def counts(engine: FakeAsyncLLM) -> dict[str, int]:
    return {one.name: one.num_requests for one in engine.statistics().tenants}


@pytest.mark.parametrize("path", BODIES)
async def test_a_request_is_that_of_its_keys_tenant(tmp_path: Path, path: str) -> None:
    async with serving(written(tmp_path)) as (client, engine):
        for key in ("sk-acme", "sk-acme", "sk-operator"):
            assert (await ask(client, key, path)).status_code == 200
        assert counts(engine) == {"acme": 2, "other": 0, "": 1}
        for key in ("", "sk-wrong", "sk-acme ", "sk-acm", "sk-acmee", hashlib.sha256(b"sk-other").hexdigest()):
            answer = await ask(client, key, path) if key.strip() == key else httpx.Response(401)
            assert answer.status_code == 401
        assert sum(counts(engine).values()) == 3


@pytest.mark.parametrize("path", BODIES)
async def test_a_body_can_t_name_a_tenant(tmp_path: Path, path: str) -> None:
    async with serving(written(tmp_path)) as (client, engine):
        for value in ("other", "", None, 3):
            answer = await ask(client, "sk-acme", path, tenant=value)
            assert answer.status_code == 400 or value is None, path
            if value is not None:
                assert "tenant" in json.dumps(answer.json())
        for name in ("x-tenant", "tenant", "x-aengine-tenant"):
            headers = bearer("sk-acme") | {name: "other"}
            assert (await client.post(path, json=BODIES[path], headers=headers)).status_code == 200
        assert counts(engine)["other"] == 0


async def test_prefixes_of_a_tenant_are_found_by_nobody_else(tmp_path: Path) -> None:
    """Whatever a body says as its salt: that of another tenant included, as it is made here."""
    async with serving(written(tmp_path), api_keys="sk-plain") as (client, _):

        async def found(key: str, **more: Any) -> int:
            answer = await ask(client, key, "/v1/chat/completions", **more)
            cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return cached

        assert await found("sk-acme") == 0 and await found("sk-acme") > 0
        made = hashlib.sha256(json.dumps(['["tenant", "acme"]', None]).encode()).hexdigest()
        for key, salt in (("sk-operator", made), ("sk-plain", "acme"), ("sk-other", made)):
            assert await found(key, cache_salt=salt) == 0
        assert await found("sk-operator") == 0
        assert await found("sk-plain") > 0, "keys without a tenant share, as always"
        assert await found("sk-acme", cache_salt="own") == 0 and await found("sk-acme", cache_salt="own") > 0


async def test_a_group_of_keys_shares_prefixes_if_the_file_says_so(tmp_path: Path) -> None:
    content = FILE.replace('tenant = "acme"', 'tenant = "acme"\ncache_group = "friends"')
    content = content.replace('tenant = "other"', 'tenant = "other"\ncache_group = "friends"')
    content = content.replace("tokens_per_minute = 60", "")
    async with serving(written(tmp_path, content)) as (client, engine):
        for key, is_found in (("sk-acme", False), ("sk-other", True), ("sk-operator", False)):
            answer = await ask(client, key, "/v1/chat/completions")
            assert (answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] > 0) == is_found
        assert counts(engine) == {"acme": 1, "other": 1, "": 1}


async def test_over_a_quota_it_is_429_with_the_time_to_wait(tmp_path: Path) -> None:
    async with serving(written(tmp_path)) as (client, engine):
        answers = [await ask(client, "sk-other", max_tokens=100) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 429]
        assert 1 <= int(answers[1].headers["retry-after"]) <= 1000
        assert answers[1].json()["error"]["code"] == "quota_exceeded"
        assert (await ask(client, "sk-acme")).status_code == 200, "others are served"
        rows = {one.name: one.num_rejected for one in engine.statistics().tenants}
        assert rows["other"] == 1


async def test_metrics_of_all_are_not_for_one_tenant(tmp_path: Path) -> None:
    pytest.importorskip("prometheus_client")
    async with serving(written(tmp_path)) as (client, _):
        await ask(client, "sk-acme")
        assert (await client.get("/metrics", headers=bearer("sk-acme"))).status_code == 403
        assert (await client.get("/stats", headers=bearer("sk-acme"))).status_code == 403
        assert (await client.get("/stats", headers=bearer("sk-operator"))).status_code == 200
        assert (await client.get("/metrics/", headers=bearer("sk-acme"))).status_code == 403
        shown = (await client.get("/metrics", headers=bearer("sk-operator"))).text
        assert re.search(r'aengine:tenant_requests_total\{.*tenant="acme"\} 1', shown)


async def test_the_file_is_read_anew_when_it_has_changed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(key_file, "_LOOK_SECONDS", 0.0)
    file = written(tmp_path)

    async def until(client: httpx.AsyncClient, key: str, status: int) -> None:
        while (await client.get("/v1/models", headers=bearer(key))).status_code != status:
            await asyncio.sleep(0.01)

    async with serving(file) as (client, _), asyncio.timeout(20):
        await until(client, "sk-acme", 200)
        written(tmp_path, FILE.replace("sk-acme", "sk-secret-2"))
        await until(client, "sk-acme", 401)
        await until(client, "sk-secret-2", 200)
        for wrong in ("[[keys]\nsecret = ", "", '[[keys]]\nkey = "sk-secret-3"\nsha256 = "sk-secret-4"\n'):
            written(tmp_path, wrong)
            while "hold on" not in caplog.text:
                await until(client, "sk-secret-2", 200)
                await asyncio.sleep(0.01)
            await until(client, "sk-secret-2", 200)
        written(tmp_path, FILE)
        await until(client, "sk-acme", 200)
    assert "sk-" not in caplog.text


@pytest.mark.parametrize(
    "content",
    [
        "",
        "keys = 3",
        "[keys]\n",
        "keys = []",
        "[[keys]]\n",
        '[[keys]]\nkey = ""\n',
        '[[keys]]\nkey = " sk-secret"\n',
        '[[keys]]\nkey = "sk-secret\\n"\n',
        '[[keys]]\nkey = "sk-secret"\nsha256 = "00"\n',
        '[[keys]]\nsha256 = "sk-secret"\n',
        f'[[keys]]\nsha256 = "{hashlib.sha256(b"").hexdigest()}"\n',
        '[[keys]]\nkey = "sk-secret"\ntenant = ""\n',
        '[[keys]]\nkey = "sk-secret"\ntenant = 3\n',
        '[[keys]]\nkey = "sk-secret"\nowner = "x"\n',
        '[[keys]]\nkey = "sk-secret"\n[[keys]]\nkey = "sk-secret"\n',
        '[[keys]]\nkey = "sk-secret"\n[tenants.a]\nweight = -1\n',
        '[[keys]]\nkey = "sk-secret\n',
    ],
)
def test_a_wrong_file_is_refused_and_nothing_of_it_shown(tmp_path: Path, content: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        KeyFile(written(tmp_path, content))
    assert caught.value.param in ("api_keys_file", "tenants")
    assert "sk-secret" not in str(caught.value)


def test_other_users_should_not_read_it(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    KeyFile(written(tmp_path))
    assert not caplog.records
    KeyFile(written(tmp_path, mode=0o644))
    assert "chmod 600" in caplog.text and "sk-" not in caplog.text


async def test_the_admin_key_is_none_of_them(tmp_path: Path) -> None:
    file = written(tmp_path)
    async with FakeAsyncLLM("a") as engine:
        for key in ("sk-acme", "sk-other"):
            with pytest.raises(InvalidRequestError, match="admin_key"):
                create_app(engine, api_keys_file=file, admin_key=key)
    async with serving(file) as (client, _):
        assert (await client.post("/pause", headers=bearer("sk-acme"))).status_code == 401
        assert (await client.get("/v1/models", headers=bearer("sk-admin"))).status_code == 401


async def test_keys_are_in_no_answer_and_no_log(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serving(written(tmp_path)) as (client, engine):
        answers = [await ask(client, key) for key in ("sk-acme", "sk-other", "sk-other", "sk-wrong")]
        said = "".join(answer.text + str(answer.headers) for answer in answers) + repr(engine.config)
    for key in ("sk-acme", "sk-other", "sk-wrong", "sk-operator"):
        assert key not in said and key not in caplog.text


async def test_each_of_many_keys_takes_as_long(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No time is measured: all digests are compared, wherever the right one is."""
    content = "".join(f'[[keys]]\nkey = "sk-{number}"\ntenant = "t{number}"\n' for number in range(50))
    file = written(tmp_path, content)
    compared: list[bytes] = []
    real = key_file.hmac.compare_digest
    monkeypatch.setattr(key_file.hmac, "compare_digest", lambda a, b: (compared.append(b), real(a, b))[1])
    async with serving(file) as (client, engine):
        for key in ("sk-0", "sk-49", "sk-no", ""):
            compared.clear()
            await client.get("/v1/models", headers=bearer(key))
            assert len(compared) == 50
        for number in range(50):
            assert (await ask(client, f"sk-{number}")).status_code == 200
        assert len(engine.statistics().tenants) <= 33


def test_a_setting_may_stand_beside_the_file(tmp_path: Path) -> None:
    from aengine.__main__ import build_parser
    from aengine.cli.serve import _engine

    file = str(written(tmp_path))
    engine = _engine(build_parser().parse_args(["serve", "m", "--quiet", "--api-keys-file", file]))
    assert engine.config.tenants == {"acme": Tenant(weight=2), "other": Tenant(tokens_per_minute=60)}
    other = tmp_path / "tenants.toml"
    other.write_text("[tenants.x]\nweight = 3\n")
    words = ["serve", "m", "--quiet", "--api-keys-file", file, "--tenants", os.fspath(other)]
    assert _engine(build_parser().parse_args(words)).config.tenants == {"x": Tenant(weight=3)}
