"""`RedisStore`: pages in a Redis server, which several engines share (aengine-llm[redis]).

A value is the page behind its checksum. Requests go in pipelines of some MB, so that a time limit is that of a bounded
number of bytes. What is dropped when the server is full is its own choice: `maxmemory-policy allkeys-lru`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ...errors import ModelLoadError
from .store import checksum

_MOST_BYTES = 8 << 20
"""Bytes of the pages of one pipeline, or of one page that is larger."""
_MOST_KEYS = 512
_MOST_VALUE = 512 << 20
"""Bytes of a value, by the server's own default (proto-max-bulk-len)."""
_CHECKSUM_BYTES = 4


class RedisStore:
    """A `KVStore` in the server at ``url``."""

    def __init__(
        self,
        url: str = "redis://localhost:6379/0",
        *,
        timeout: float = 1.0,
        prefix: str = "aengine:kv:",
        expires: int | None = None,
        password: str | None = None,
    ) -> None:
        """``timeout``: seconds for a connection, and for each part of an answer; ``prefix``: what names of keys begin
        with; ``expires``: seconds after which a page goes that was not saved again. The server need not run yet.

        Raises ModelLoadError: the options can't be used.
        """
        try:
            from redis import Redis
            from redis.backoff import NoBackoff
            from redis.retry import Retry
        except ImportError as error:
            raise ModelLoadError(f"kv_tiers: a redis store needs aengine-llm[redis]: {error}") from error
        options: dict[str, Any] = {"password": str(password)} if password is not None else {}
        self._redis: Any = Redis.from_url(
            url, socket_timeout=timeout, socket_connect_timeout=timeout, retry=Retry(NoBackoff(), 0), **options
        )
        self._prefix = prefix.encode()
        self._expires = expires

    def query(self, keys: Sequence[bytes]) -> int:
        for begin in range(0, len(keys), _MOST_KEYS):
            there = self._there(keys[begin : begin + _MOST_KEYS])
            if not all(there):
                return begin + there.index(False)
        return len(keys)

    def load(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> list[bool]:
        filled: list[bool] = []
        for begin, end in _parts(pages):
            values = self._redis.mget([self._prefix + key for key in keys[begin:end]])
            filled += [_fill(*one) for one in zip(keys[begin:end], pages[begin:end], values, strict=True)]
        return filled

    def save(self, keys: Sequence[bytes], pages: Sequence[memoryview]) -> None:
        for begin, end in _parts(pages):
            there = self._there(keys[begin:end])
            with self._redis.pipeline(transaction=False) as pipeline:
                for key, page, is_there in zip(keys[begin:end], pages[begin:end], there, strict=True):
                    if not is_there and len(page) <= _MOST_VALUE - _CHECKSUM_BYTES:
                        value = b"".join([checksum(key, page).to_bytes(_CHECKSUM_BYTES, "little"), page])
                        pipeline.set(self._prefix + key, value, ex=self._expires)
                # Else the error of a full server would have a part of the page in its text.
                results = pipeline.execute(raise_on_error=False)
            for result in results:
                if isinstance(result, Exception):
                    raise result

    def close(self) -> None:
        self._redis.close()

    def _there(self, keys: Sequence[bytes]) -> list[bool]:
        with self._redis.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.exists(self._prefix + key)
            return [bool(number) for number in pipeline.execute()]


def _fill(key: bytes, page: memoryview, value: bytes | None) -> bool:
    """Write a value to its page, if it is what was saved."""
    if value is None or len(value) != _CHECKSUM_BYTES + len(page):
        return False
    content = memoryview(value)[_CHECKSUM_BYTES:]
    if checksum(key, content).to_bytes(_CHECKSUM_BYTES, "little") != value[:_CHECKSUM_BYTES]:
        return False
    page[:] = content
    return True


def _parts(pages: Sequence[memoryview]) -> Iterator[tuple[int, int]]:
    """Yield (begin, end) of pages that go together."""
    begin = 0
    while begin < len(pages):
        end = begin + max(1, min(_MOST_KEYS, _MOST_BYTES // max(1, len(pages[begin]))))
        yield begin, min(end, len(pages))
        begin = end
