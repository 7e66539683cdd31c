"""The setting ``kv_tiers``: as objects, as a text, in the environment, over the wire; and what is refused."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from aengine import DiskTier, EngineConfig, HostTier, InvalidRequestError, StoreTier

REDIS = "redis:url=redis://:secret@host:6379/0;timeout=2.5;database=3"


def tiers_of(given: Any, **settings: Any) -> Any:
    return EngineConfig(model="m", kv_tiers=given, **settings).kv_tiers


def test_objects_texts_and_what_a_worker_gets_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = (
        HostTier("40GB"),
        DiskTier(Path("/data/kv:1"), "1.5 TiB"),
        StoreTier("redis", url="redis://:secret@host:6379/0", timeout=2.5, database=3),
        StoreTier("a.stores:Mine"),
    )
    text = f"host:40GB, disk:/data/kv:1:1.5TiB,{REDIS},a.stores:Mine"
    config = EngineConfig(model="m", kv_tiers=list(wanted))
    assert config.kv_tiers == wanted == tiers_of(text)
    assert EngineConfig.from_wire(config.to_wire()) == config == config.replace(max_num_seqs=config.max_num_seqs)
    monkeypatch.setenv("AENGINE_KV_TIERS", text)
    assert EngineConfig.from_env(model="m").kv_tiers == wanted
    assert tiers_of(()) == tiers_of([]) == tiers_of("") == EngineConfig(model="m").kv_tiers == ()


@pytest.mark.parametrize(
    ("text", "size"),
    [("7", 7), ("7B", 7), ("2kb", 2000), ("3MiB", 3 << 20), ("1.5GB", 1_500_000_000), (" 2 TB ", 2 * 10**12)],
)
def test_sizes(text: str, size: int) -> None:
    assert HostTier(text).num_bytes == HostTier(size).num_bytes == DiskTier("/x", text).num_bytes == size


def test_a_path_is_the_same_in_every_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/me")
    assert DiskTier("~/kv", 1).path == "/home/me/kv"
    assert DiskTier("kv/../own/", 1).path == os.path.join(os.getcwd(), "own")


@pytest.mark.parametrize(
    "size", [0, -1, True, None, 1.5, "", "-1GB", "1PB", "GB", "1 0", "9" * 400, 1 << 61, "nan", [1]]
)
def test_sizes_that_are_none(size: Any) -> None:
    for make in (lambda: HostTier(size), lambda: DiskTier("/x", size)):
        with pytest.raises(
            InvalidRequestError, match=r"Tier whose size is a number of bytes above 0.*'40GB'"
        ) as caught:
            make()
        assert caught.value.param == "kv_tiers"


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (3, "a list of at most 8 tiers, or a text: 'host:SIZE', 'disk:PATH:SIZE'"),
        ([3], r"a list of HostTier\(size\), DiskTier\(path, size\) and StoreTier"),
        ([{"size": 3, "path": "/x", "more": 1}], r"a list of HostTier\(size\)"),
        (["host:40GB"], r"a list of HostTier\(size\)"),
        ([HostTier(1)] * 9, "at most 8 tiers"),
        ("disk:/x:1GB", r"must begin with a HostTier, .*: HostTier\('1GB'\), DiskTier"),
        ("host:1,host:2", "several HostTiers: give one"),
        ("host:1,disk:/x:1,disk:/x/:2", "has /x twice: leave one of them out"),
        (f"host:1,{REDIS},{REDIS}", r"has StoreTier\('redis', url='redis://...@host.* twice"),
        ("host:1,disk:/x", "'disk:/x' is not valid: it must be 'host:SIZE'"),
        ("host:1,disk::1GB", "a DiskTier whose path is a folder's"),
        ("host:1,hots:40GB", "'module:Class', or one of 'redis'"),
        ("host:1,redis:=3", "'NAME:option=value;option=value'"),
        ("host:1,redis:url", None),  # a class of a module, as far as can be seen
        ("40GB", "must begin with a HostTier"),
    ],
)
def test_what_is_refused(given: Any, message: str | None) -> None:
    if message is None:
        assert tiers_of(given)[1] == StoreTier("redis:url")
        return
    with pytest.raises(InvalidRequestError, match=message) as caught:
        tiers_of(given)
    assert caught.value.param == "kv_tiers" and str(caught.value).startswith("kv_tiers")


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    with pytest.raises(InvalidRequestError, match="no effect without enable_prefix_caching=True"):
        tiers_of("host:1GB", enable_prefix_caching=False)
    assert tiers_of((), enable_prefix_caching=False) == ()


@pytest.mark.parametrize("options", [{"a": object()}, {"a": [1]}, {"a": "\ud800"}])
def test_options_of_a_store_are_plain_data(options: Any) -> None:
    with pytest.raises(InvalidRequestError, match="options are texts, numbers or None"):
        StoreTier("redis", **options)


def test_no_password_is_shown() -> None:
    tier = StoreTier("redis", url="redis://me:secret@host/0", password="secret")
    config = EngineConfig(model="m", kv_tiers=[HostTier(1), tier])
    assert "secret" not in f"{tier} {config!r} {config}" and "host/0" in repr(tier)
    for url in ("redis://me:p@secret@host/0", "redis://host/0?password=secret"):
        assert "secret" not in repr(StoreTier("redis", url=url))
    assert "secret" not in repr(StoreTier("mine", token="secret", endpoint="https://host/?key=secret"))
    for wrong in ([HostTier(1), tier, tier], [tier], "host:1,redis:url=redis://:secret@h;=1"):
        with pytest.raises(InvalidRequestError) as caught:
            tiers_of(wrong)
        assert "secret" not in str(caught.value)
