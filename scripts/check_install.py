"""Check that aengine can be installed from the plain package index: every supported Python, x86-64 and arm64.

Each line of the output is a dry run of installing aengine with all extras: with the pins of constraints.txt, or
without any, which is what a user's project gets. `uv` resolves them from the metadata of the wheels alone (no
package is downloaded), and for a Python and a processor that this machine does not have, which pip can't: it
evaluates the markers of requirements for the Python that runs it, and refuses source archives. Settings of pip on
this machine (find-links, extra indexes) are not used, because they hide what everybody else would see;
UV_DEFAULT_INDEX names a mirror of PyPI.

Exit status: 0 if all succeed or the index cannot be reached (which is said), 1 if one fails.
"""

from __future__ import annotations

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
import tomllib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PYTHONS = ("3.11", "3.12", "3.13")
# glibc 2.31 is what the wheels of llguidance ask for: Debian 11, Ubuntu 20.04, RHEL 9.
PLATFORMS = ("x86_64-manylinux_2_31", "aarch64-manylinux_2_31")
# Published as a source archive only; a pure Python module of one file.
SOURCE_ONLY = ("forbiddenfruit",)
# All the dry runs read the same pages of the index: kept for ten minutes, also where a proxy forgets to allow it.
SETTINGS = """
[[index]]
url = "{url}"
default = true
cache-control = {{ api = "max-age=600", files = "max-age=31536000, immutable" }}
"""


def requirements() -> list[str]:
    """What pyproject.toml declares for aengine with all its extras, but for itself: the index need not have it."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    declared = [*project["dependencies"], *itertools.chain(*project["optional-dependencies"].values())]
    return [one for one in declared if not one.startswith(f"{project['name']}[")]


def index_url() -> str:
    return os.environ.get("UV_DEFAULT_INDEX", "https://pypi.org/simple").rstrip("/")


def unreachable(url: str) -> str:
    """Why the index does not answer within ten seconds; "" if it does."""
    try:
        with urllib.request.urlopen(f"{url}/pip/", timeout=10):
            return ""
    except (OSError, ValueError) as error:
        return str(getattr(error, "reason", error))


def resolve(python: str, platform: str, folder: Path, constraints: Path | None) -> tuple[bool, str]:
    """Resolve ``folder``/requirements.in by its uv.toml. Returns whether it succeeded, and uv's messages."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--no-header", "--no-annotate"]
    command += ["--python", sys.executable, "--no-python-downloads"]  # of its own; the version below is the target
    command += ["--config-file", str(folder / "uv.toml"), "--python-version", python, "--python-platform", platform]
    command += ["--only-binary", ":all:", *(f"--no-binary={name}" for name in SOURCE_ONLY)]
    if constraints is not None:
        command += ["--constraints", str(constraints)]
    keep = ("UV_CACHE_DIR", "UV_HTTP_TIMEOUT", "UV_NATIVE_TLS", "UV_SYSTEM_CERTS")
    environment = {k: v for k, v in os.environ.items() if not k.startswith("UV_") or k in keep}
    command += [str(folder / "requirements.in")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd="/")
    return done.returncode == 0, done.stderr.strip()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", help="the pins to check")
    parser.add_argument("--python", nargs="+", default=PYTHONS, help="Python versions (%(default)s)")
    parser.add_argument("--platform", nargs="+", default=PLATFORMS, help="uv's names of platforms (%(default)s)")
    args = parser.parse_args()

    problem = unreachable(index_url())
    if problem:
        print(f"SKIPPED: {index_url()} cannot be reached ({problem}); whether aengine installs from it is NOT checked")
        return 0
    cases = [
        (python, platform, pins)
        for pins in (args.constraints.resolve(), None)
        for python in args.python
        for platform in args.platform
    ]
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(4) as pool:
        folder = Path(name)
        (folder / "requirements.in").write_text("\n".join(requirements()))
        (folder / "uv.toml").write_text(SETTINGS.format(url=index_url()))
        first = resolve(cases[0][0], cases[0][1], folder, cases[0][2])  # alone: the others find its pages in uv's cache
        results = [first, *pool.map(lambda case: resolve(case[0], case[1], folder, case[2]), cases[1:])]
    for (python, platform, pins), (succeeded, messages) in zip(cases, results):
        how = f"with {pins.name}" if pins else "without constraints"
        print(f"{'ok  ' if succeeded else 'FAIL'}  Python {python}, {platform}, {how}")
        if not succeeded:
            print("      " + messages.replace("\n", "\n      "))
    failed = sum(not succeeded for succeeded, _ in results)
    print(f"{len(cases) - failed} of {len(cases)} installs resolve, {time.monotonic() - begun:.0f} s")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
