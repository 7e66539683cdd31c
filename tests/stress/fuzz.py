"""Malformed frames, calls and answers, thousands of them: each must end in a result or in one typed error.

    python tests/stress/fuzz.py [--calls 10000] [--frames 10000] [--answers 3000] [--seed S]

Prints one JSON object: how often what came of it, and the findings, of which there should be none: else the exit code
is 1. One call can be made again alone: --calls 1 --first N with the same seed.

  frames     random bytes and mutations of valid messages, given to `unpack`, to the consuming end of a ring and to a
             `ProcessExecutor` (each so many)
  calls      `generate`, `stream`, `chat`, `stream_chat` with one argument spoiled, over a worker that answers at once
  answers    requests whose worker answers nonsense now and then, and is replaced
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import resource
import sys
import time
from collections.abc import Coroutine
from typing import Any

from fuzz_calls import fuzz_answers, fuzz_calls
from fuzz_frames import Report, fuzz_frames

MOST_MEMORY = 12 << 30  # of addresses: a blow-up is an error here, and not the machine's end


def told(work: Coroutine[Any, Any, Report]) -> dict[str, Any]:
    begun = time.perf_counter()
    report = asyncio.run(work)
    return {
        "outcomes": dict(report.outcomes.most_common()),
        "findings": report.findings,
        "counts": dict(report.counts),
        "slowest_s": round(report.slowest, 3),
        "slowest": report.slowest_what,
        "seconds": round(time.perf_counter() - begun, 1),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--frames", type=int, default=10_000)
    parser.add_argument("--answers", type=int, default=3_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--first", type=int, default=0, help="number of the first call")
    args = parser.parse_args()
    logging.getLogger("aengine").setLevel(logging.CRITICAL)  # each of a thousand deaths is logged
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    result: dict[str, Any] = {"benchmark": "fuzz", "seed": args.seed}
    if args.frames:
        result["frames"] = told(fuzz_frames(args.frames, args.seed))
    if args.calls:
        result["calls"] = told(fuzz_calls(args.calls, args.seed, first=args.first))
    if args.answers:
        result["answers"] = told(fuzz_answers(args.answers, args.seed))
    result["peak_memory_mb"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
    print(json.dumps(result))
    return 1 if any(isinstance(part, dict) and part["findings"] for part in result.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
