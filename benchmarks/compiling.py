"""How long processes that start together on an empty cache of kernels take to compile them all; it needs no GPU.

    python benchmarks/compiling.py [--processes 2] [--threads 1] [--apart]

Each compiles the kernels of tests/kernels/compile_everything.py --largest for compute capability 9.0, as ranks and
replicas do that start; --apart: as if the others were not there. Prints the seconds of each, and how many it compiled
itself. JSON to stdout.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "kernels"))


def compile_all(args: argparse.Namespace) -> dict[str, float]:
    """Compile in this process."""
    import triton
    from compile_everything import Compiler, largest
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, make_backend
    from triton.runtime.cache import get_cache_key

    from aengine.kernels.dispatch import triton_everywhere
    from aengine.kernels.triton.compile_once import CompileOnce

    compiled: list[str] = []
    triton.knobs.compilation.listener = lambda *, src, cache_hit, **_: None if cache_hit else compiled.append(src.name)

    with ThreadPoolExecutor(args.threads if args.apart else 256) as pool:
        mode = triton.AsyncCompileMode(pool) if args.apart else CompileOnce(pool, args.threads)

        class Later(Compiler):
            def compile(self, source: ASTSource, target: GPUTarget, options: dict[str, Any]) -> None:
                backend = make_backend(target)
                parsed = backend.parse_options(dict(options))
                key = get_cache_key(source, backend, parsed, {})
                mode.submit(key, lambda: triton.compile(source, target=target, options=options), lambda kernel: None)

        compiler = Later(90)
        compiler.install()
        begun = time.monotonic()
        with mode, triton_everywhere():
            largest(compiler)
    return {"seconds": round(time.monotonic() - begun, 1), "compiled": len(compiled), "kernels": len(compiler._seen)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="that compile, of each process")
    parser.add_argument("--apart", action="store_true")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(compile_all(args)))
        return
    with tempfile.TemporaryDirectory() as cache:
        environment = dict(os.environ, TRITON_CACHE_DIR=cache)
        command = [sys.executable, __file__, "--child", *sys.argv[1:]]
        processes = [
            subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(args.processes)
        ]
        print(json.dumps([json.loads(process.communicate()[0].splitlines()[-1]) for process in processes]))


if __name__ == "__main__":
    main()
