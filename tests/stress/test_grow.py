"""A little of what grow.py does: it runs, and nobody notices what grows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import grow
import pytest
from pairs import some

from aengine.testing import FakeAsyncLLM

SCRIPT = Path(__file__).parent / "grow.py"


@pytest.mark.parametrize("door", some(["process", "remote", "http"], "process", "http"))
def test_a_little_of_each_door(door: str) -> None:
    fields = ["messages", "prompt", "ids", "tools", "choice", "n", "logprobs", "logit_bias", "cache_salt"]
    command = [
        sys.executable,
        str(SCRIPT),
        "--doors",
        door,
        "--most-values",
        "1000",
        "--rounds",
        "1",
        "--fields",
        *fields,
    ]
    done = subprocess.run([*command, "--stall", "30", "--delay", "60"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    line = json.loads(done.stdout)
    assert line["broken"] == [] and line["values"] == 27
    lines = [one.split() for one in done.stderr.splitlines() if one.startswith(door)]
    outcomes = {(words[1], words[2]): set(words[16:]) for words in lines}
    assert outcomes["messages", "10"] == {"ok"} and outcomes["n", "10"] == {"ok"}
    assert outcomes["logprobs", "100"] == {"400" if door == "http" else "InvalidRequestError"}


async def test_cases_are_what_they_say() -> None:
    """Each is answered where it is small: else what it grows would not be looked at."""
    async with FakeAsyncLLM("word") as engine, grow.http_client(engine) as client:
        for name in [*grow.CASES, *(f"nested {name}" for name in grow.HOLES)]:
            found = [await grow.outcome(one) for one in grow.whole_bodies(client, name, grow.bodies_of(name, 8))]
            assert len(found) == (1 if name in grow.CASES else 5) and not {"404", "413", "415"} & set(found), name
            if "x" in name.split() or "tool_result" in name:
                assert found == ["ok"], name
            if name.startswith("nested"):
                assert found[4] == "400", "NaN is none"
    texts = [make(3) for make in grow.KINDS.values()]
    assert len(texts) == len(set(texts)) and "999" in texts and "1e3" in texts and "[[[]]]" in texts


async def test_each_field_of_each_body_grows() -> None:
    """Of every interface that takes a body, and from one that is answered: else its fields would not be looked at."""
    bodies = {path: body for method, path, _, body in (entry for entry in grow.ENDPOINTS if len(entry) == 4)}
    assert {bodies[path] for path in grow.BODIES} == set(bodies.values())
    fields = grow.fields_of_bodies()
    assert len(fields) == len(set(fields)) == sum(len(bodies[path].model_fields) for path in grow.BODIES)
    async with FakeAsyncLLM("word") as engine, grow.http_client(engine) as client:
        for path, body in grow.BODIES.items():
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, (path, answer.text)
