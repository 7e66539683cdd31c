"""Pages in a Redis server that engines share, and one that is full, gone, slow, or has another's values."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest
from redis_server import redis_server
from test_disk_store import PAGE, found, key_of, page_of, save

from aengine import ModelLoadError, StoreTier
from aengine.engine.stores.choice import open_store
from aengine.engine.stores.store import KVStore

pytest.importorskip("redis")


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with redis_server(tmp_path_factory.mktemp("redis")) as url:
        yield url


@pytest.fixture
def server(url: str) -> Iterator[Any]:
    """A client of the server, which is empty."""
    from redis import Redis

    client: Any = Redis.from_url(url)
    client.flushall()
    yield client
    client.close()


@pytest.fixture
def store(url: str, server: Any) -> Iterator[KVStore]:
    store = open_store(StoreTier("redis", url=url))
    yield store
    store.close()


def test_engines_share_pages(store: KVStore, url: str) -> None:
    other = open_store(StoreTier("redis", url=url))
    apart = open_store(StoreTier("redis", url=url, prefix="another:"))
    assert other.query([key_of(0)]) == 0 and found(other, 0) == [False]
    save(store, 0, 1, 2, 4)
    save(other, 1, 5)
    assert other.query([key_of(n) for n in range(6)]) == 3 and other.query([]) == 0
    assert found(other, *range(6)) == [True, True, True, False, True, True]
    assert apart.query([key_of(0)]) == 0
    other.close()
    apart.close()


def test_many_pages_and_large_ones(store: KVStore) -> None:
    keys = [key_of(n) for n in range(1100)]
    store.save(keys, [memoryview(page_of(n, 100)) for n in range(1100)])
    assert store.query(keys) == 1100 and store.query([*keys[:700], key_of(5000), *keys[700:]]) == 700
    pages = [bytearray(100) for _ in keys]
    assert all(store.load(keys, list(map(memoryview, pages)))) and pages[1099] == page_of(1099, 100)
    large = bytearray(9 << 20)
    store.save([key_of(1)], [memoryview(large)])  # it is there by this key
    store.save([key_of(2000)], [memoryview(large)])
    assert store.load([key_of(2000)], [memoryview(large)]) == [True]


def test_a_page_that_expires(url: str, server: Any) -> None:
    store = open_store(StoreTier("redis", url=url, expires=1000))
    save(store, 77)
    assert 990 < server.ttl(b"aengine:kv:" + key_of(77)) <= 1000
    store.close()


@pytest.mark.parametrize(
    "damaged",
    [b"", b"abc", bytes(4 + PAGE), page_of(0), page_of(0) + b"1234", b"\0\0\0\0" + page_of(0)],
    ids=range(6),
)
def test_a_damaged_page_is_not_loaded(store: KVStore, server: Any, damaged: bytes) -> None:
    save(store, 0, 1)
    server.set(b"aengine:kv:" + key_of(0), damaged)
    assert found(store, 0, 1) == [False, True]
    save(store, 1)
    server.copy(b"aengine:kv:" + key_of(1), b"aengine:kv:" + key_of(0), replace=True)
    assert found(store, 0, 1) == [False, True], "another page's"
    server.delete(b"aengine:kv:" + key_of(0))
    server.lpush(b"aengine:kv:" + key_of(0), "no text")
    assert found(store, 0, 1) == [False, True]


def test_a_server_that_is_full(store: KVStore, server: Any) -> None:
    """It refuses more, unless it is to drop what is there."""
    server.config_set("maxmemory", "20mb")
    with pytest.raises(Exception, match=r"^command not allowed when used memory > 'maxmemory'.?$"):
        save(store, *range(3000))
    assert found(store, 0) == [True]
    server.config_set("maxmemory-policy", "allkeys-lru")
    save(store, *range(4000, 4500))
    assert found(store, 4499) == [True]
    server.config_set("maxmemory-policy", "noeviction")
    server.config_set("maxmemory", "0")


def test_a_server_that_does_not_answer() -> None:
    """It costs as long as was said, once."""
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        store = open_store(StoreTier("redis", url=f"redis://127.0.0.1:{port}", timeout=0.2))
        for call in (lambda: store.query([key_of(0)]), lambda: found(store, 0), lambda: save(store, 0)):
            begun = time.monotonic()
            with pytest.raises(Exception, match="[Tt]imeout|timed out"):
                call()
            assert time.monotonic() - begun < 10  # not for ever
        store.close()
    gone = open_store(StoreTier("redis", url=f"redis://127.0.0.1:{port}", timeout=0.2))
    with pytest.raises(Exception, match="refused"):
        gone.query([key_of(0)])
    gone.close()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "http://h"}, "Redis URL must specify one of the following schemes"),
        ({"url": 3}, "can't be used"),
        ({"where": "redis://h"}, "unexpected keyword argument 'where'"),
        ({"url": "redis://:hidden@h:port/0"}, "can't be used"),
    ],
)
def test_options_that_can_not_be_used(options: Any, message: str) -> None:
    with pytest.raises(ModelLoadError, match=r"kv_tiers: .*" + message) as caught:
        open_store(StoreTier("redis", **options))
    assert "hidden" not in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "redis", None)
    with pytest.raises(ModelLoadError, match=r"needs aengine-llm\[redis\]"):
        open_store(StoreTier("redis"))
