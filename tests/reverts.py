"""Whether the tests would find again what was mended: takes mends back, one by one.

    python tests/reverts.py --since v0.3 --count 40
    python tests/reverts.py 9c8b697 e224c03

Chooses the newest commits that changed code in aengine/ (at most ``--lines`` lines) and a test file; or takes those
named. In a clone of its own, undoes of each what it did in aengine/, and nothing else; skips what does not merge any
more. Then runs, up to the first failure, the test files that the commit changed, and if they pass, the folders that
these are in. A failure counts as "caught" if the same test fails once more without the mend, and passes on the
code as it is. "unfit" is a test that then passes without the mend, too, whose failure was of another cause, and one
that can't even be imported, which tells nothing about behaviour.
Prints a line a commit and the share caught; exit code 1 if that is less than ``--least``.
"""

from __future__ import annotations

import argparse
import ast
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


class Tree:
    """A clone of the repository at HEAD, whose package is changed."""

    def __init__(self, folder: Path, seconds: float) -> None:
        self.folder, self.seconds = folder, seconds
        subprocess.run(["git", "clone", "-q", "--shared", str(ROOT), str(folder)], check=True)

    def git(self, *args: str) -> str:
        """Return the output; it is wanted even where a merge conflicts, which git says by its exit code."""
        return subprocess.run(["git", *args], cwd=self.folder, capture_output=True, text=True).stdout

    def mends(self, since: str, lines: int) -> Iterator[str]:
        """Yield the commits after ``since``, newest first, that changed code of the package and a test."""
        for commit in self.git("rev-list", "--no-merges", f"{since}..HEAD").split():
            numstat = self.git("show", "--numstat", "--format=", commit)
            stats = re.findall(r"^(\d+)\t(\d+)\t(aengine/\S+\.py)$", numstat, re.MULTILINE)
            if self.tests_of(commit) and sum(int(new) + int(old) for new, old, _ in stats) <= lines:
                if any(self._code(f"{commit}^", path) != self._code(commit, path) for *_, path in stats):
                    yield commit

    def _code(self, commit: str, path: str) -> str:
        """A file of a commit without comments and docstrings."""
        return re.sub(r'"""[\s\S]*?"""', "", ast.unparse(ast.parse(self.git("show", f"{commit}:{path}"))))

    def tests_of(self, commit: str) -> list[str]:
        """The test files that a commit changed and that are still there."""
        names = self.git("show", "--name-only", "--format=", commit).split()
        return [name for name in names if re.search(r"^tests/(.*/)?test_\w+\.py$", name) and (ROOT / name).exists()]

    def undo(self, commit: str) -> bool:
        """Take what a commit did in aengine/ out of the tree. Returns whether that merged and was still there."""
        self.git("revert", "--no-commit", commit)
        conflicts = self.git("diff", "--name-only", "--diff-filter=U", "--", "aengine")
        self.git("restore", "--staged", "--worktree", "--source=HEAD", "--", ".", ":!aengine")
        return not conflicts and bool(self.git("status", "--porcelain"))

    def restore(self) -> None:
        self.git("reset", "--hard")

    def run(self, *tests: str) -> tuple[int, str]:
        """(pytest's exit code, the test that failed)."""
        options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider"]
        environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONDONTWRITEBYTECODE": "1"}
        command = ["timeout", f"{self.seconds}", sys.executable, "-m", "pytest", *options, *tests]
        done = subprocess.run(command, cwd=self.folder, env=environ, capture_output=True, text=True)
        failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - .*)?$", done.stdout, re.MULTILINE)
        return done.returncode, failed[1] if failed else ""

    def outcome(self, commit: str) -> str:
        if not self.undo(commit):
            self.restore()
            return "skipped"
        files = self.tests_of(commit)
        end, failed = self.run(*files)
        while failed in files and len(files) > 1:  # it imports what the mend brought
            files.remove(failed)
            end, failed = self.run(*files)
        if end == 0:
            end, failed = self.run(*sorted({str(Path(name).parent) for name in files if name.count("/") > 1}))
        is_certain = end == 1 and "::" in failed and self.run(failed)[0] == 1
        self.restore()
        if end != 1 or "::" not in failed:
            return {0: "survives", 5: "survives"}.get(end, f"unfit: {end} {failed}")
        if not is_certain:
            return f"unfit: passes without the mend, too, {failed}"
        return f"caught by {failed}" if self.run(failed)[0] == 0 else f"unfit: fails as it is, {failed}"


def main() -> int:
    parser = argparse.ArgumentParser(usage=__doc__)
    parser.add_argument("commits", nargs="*")
    parser.add_argument("--since", default="HEAD~150")
    parser.add_argument("--count", type=int, default=40)
    parser.add_argument("--lines", type=int, default=100)
    parser.add_argument("--least", type=float, default=0.0)
    parser.add_argument("--seconds", type=float, default=600.0, help="for the tests of one commit")
    args = parser.parse_args()
    ends: list[str] = []
    with tempfile.TemporaryDirectory(prefix="reverts-") as folder:
        tree = Tree(Path(folder) / "aengine", args.seconds)
        for commit in args.commits or tree.mends(args.since, args.lines):
            end = tree.outcome(commit)
            print(tree.git("log", "-1", "--format=%h %s", commit).strip(), end, sep=": ", flush=True)
            ends += [end] if end != "skipped" else []
            if len(ends) == args.count:
                break
    caught, fit = (sum(end.startswith(word) for end in ends) for word in ("caught", ("caught", "survives")))
    print(f"{caught} of {fit} caught, {len(ends) - fit} unfit")
    return int(caught < args.least * fit)


if __name__ == "__main__":
    sys.exit(main())
