"""Headers of safetensors files that are parsed in pieces: what json makes of them at once."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from aengine.checkpoint import safetensors_files
from aengine.checkpoint.safetensors_files import json_of_metadata, tensor_places
from aengine.errors import ModelLoadError


def write(path: Path, header: str) -> Path:
    content = header.encode()
    path.write_bytes(len(content).to_bytes(8, "little") + content + bytes(4000))
    return path


@pytest.mark.parametrize("piece", [1, 7, 90])
def test_pieces_are_the_whole(tmp_path: Path, rng: random.Random, monkeypatch: pytest.MonkeyPatch, piece: int) -> None:
    """Where texts look like the end of an entry, names come twice, and entries hold others."""
    monkeypatch.setattr(safetensors_files, "_PIECE", piece)
    tricky = ['a},"b', 'a}","b', '},\\"', "{", "é", " ", 'x":{"y']
    for _ in range(50):
        names = [rng.choice(tricky) * rng.randint(0, 2) + str(rng.randrange(9)) for _ in range(rng.randint(1, 12))]
        entries = []
        for i, name in enumerate(names):
            entry = {"dtype": "F32", "shape": [i, 1], "data_offsets": [4 * i, 8 * i], "o": {"p": {}}}
            entries.append(f"{json.dumps(name)}:{json.dumps(entry)}")
        metadata = {"config": json.dumps({text: text for text in rng.sample(tricky, 3)})}
        entries.insert(rng.randint(0, len(entries)), f'"__metadata__": {json.dumps(metadata)}')
        text = "{" + rng.choice([",", ", ", " ,\n"]).join(entries) + "}" + " " * rng.randint(0, 8)
        path = write(tmp_path / "one.safetensors", text)
        wanted = {name: tuple(entry["shape"]) for name, entry in json.loads(text).items() if name != "__metadata__"}
        assert {name: place.shape for name, place in tensor_places(path).items()} == wanted
        assert json_of_metadata(path, "config") == json.loads(metadata["config"])


@pytest.mark.parametrize("header", ["", "[1]", '{"a":1},"b":2}', '{"a":{}', '["a},"b"]', '{"a":{"shape":[]}},"b":{}}'])
def test_what_is_none_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, header: str) -> None:
    monkeypatch.setattr(safetensors_files, "_PIECE", 1)
    with pytest.raises(ModelLoadError, match="truncated or corrupt"):
        tensor_places(write(tmp_path / "one.safetensors", header))
