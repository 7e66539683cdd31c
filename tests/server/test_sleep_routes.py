"""An engine that sleeps, over HTTP: with the admin key, and what probes and dashboards see of it."""

from __future__ import annotations

import pytest
from test_admin import KEY, client_of

from aengine.testing import FakeAsyncLLM


@pytest.mark.parametrize("when_asleep", ["wake", "wait"])
async def test_sleep_and_waking(when_asleep: str) -> None:
    engine = FakeAsyncLLM("a", when_asleep=when_asleep)
    async with client_of(engine, admin_key="admin") as client:

        async def post(path: str, status: int = 200, **how: object) -> bool | None:
            answer = await client.post(path, headers=KEY, **how)  # type: ignore[arg-type]
            assert answer.status_code == status, answer.text
            return answer.json().get("is_sleeping")

        assert await post("/sleep") is True
        assert (await client.get("/is_sleeping", headers=KEY)).json() == {"is_sleeping": True}
        assert (await client.get("/livez")).status_code == 200
        assert (await client.get("/readyz")).status_code == (200 if when_asleep == "wake" else 503)
        assert engine.is_sleeping
        metrics = (await client.get("/metrics")).text
        assert 'sleep_state="awake"} 0.0' in metrics and 'sleep_state="discard_all"} 1.0' in metrics
        assert await post("/wake_up?tags=kv_cache") is True
        assert await post("/wake_up?tags=weights&tags=kv_cache") is False
        assert await post("/sleep?level=2&mode=abort") is True
        assert await post("/wake_up", json={"tags": ["weights", "kv_cache"]}) is False
        assert await post("/sleep", json={"level": 1}) is True
        assert await post("/wake_up", json={}) is False
        assert await post("/sleep?model=fake") is True
        assert await post("/wake_up?model=fake", json={"tags": ["weights", "kv_cache"]}) is False
        await post("/sleep?model=other", 404)
        for wrong in ("/sleep?level=3", "/sleep?level=x", "/sleep?depth=1", "/wake_up?tags=kv"):
            await post(wrong, 400)
        assert engine.state == "running"
        assert 'sleep_state="awake"} 1.0' in (await client.get("/metrics")).text
