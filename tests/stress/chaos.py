"""Attacks on an engine, seeded. A JSON line for each part to stdout; exit code 1 if a promise was broken.

    python tests/stress/chaos.py kills                100 workers of SmolLM2 killed under 64 streams (--kills 12: 3 min)
    python tests/stress/chaos.py hangs                workers stopped in mid-step
    python tests/stress/chaos.py replicas             workers of two replicas killed, whose streams go on with the other
    python tests/stress/chaos.py hosts                hosts killed while they start and while they stream
                                                     these four with --ranks 4, say: of a tiny model, tensor parallel
                                                     or --by pipeline, --by experts
    python tests/stress/chaos.py cancels              100,000 requests cancelled in ten ways, at any moment
    python tests/stress/chaos.py requests             1,000,000 tiny requests

The last two have a real worker process with a runner that answers at once, so that what is measured is the engine.
Without --seed a fresh one is taken; it is part of the line. Moments are drawn from it, but what a moment meets is the
machine's: the same seed is not quite the same run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import sys
import time

from chaos_common import Promises, say
from chaos_hosts import hosts
from chaos_replicas import replicas
from chaos_requests import Canceller, cancels, requests
from chaos_workers import hangs, kills

ASYNC_PARTS = {"kills": kills, "hangs": hangs, "replicas": replicas, "cancels": cancels, "requests": requests}


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    for name in ("kills", "hangs", "replicas", "hosts", "cancels", "requests"):
        parts.add_parser(name).add_argument("--seed", type=int)
    for name in ("kills", "hangs", "replicas", "hosts"):
        parts.choices[name].add_argument("--ranks", type=int, default=1, help="several: of a tiny model")
        parts.choices[name].add_argument(
            "--by",
            choices=["tensor", "pipeline", "experts"],
            default="tensor",
            help="what is divided among them: layers, the list of layers, experts of as many replicas",
        )
    for name in ("kills", "hangs", "replicas"):
        default = {"kills": 64, "hangs": 8, "replicas": 16}[name]
        parts.choices[name].add_argument("--streams", type=int, default=default)
        parts.choices[name].add_argument("--tokens", type=int, default=64, help="most of a completion")
    parts.choices["kills"].add_argument("--kills", type=int, default=100)
    parts.choices["kills"].add_argument("--mean", type=float, default=1.5, help="seconds from ready to kill")
    parts.choices["replicas"].add_argument("--kills", type=int, default=40)
    parts.choices["replicas"].add_argument("--mean", type=float, default=2.5, help="seconds between kills")
    parts.choices["replicas"].add_argument("--replicas", type=int, default=2)
    parts.choices["hangs"].add_argument("--hangs", type=int, default=10)
    parts.choices["hosts"].add_argument("--hosts", type=int, default=100)
    parts.choices["hosts"].add_argument("--model", choices=["real", "fake", "both"], default="both")
    parts.choices["cancels"].add_argument("--cancels", type=int, default=100_000)
    parts.choices["cancels"].add_argument("--slots", type=int, default=256, help="requests at once")
    parts.choices["cancels"].add_argument("--blocks", type=int, default=2000, help="of KV; with 300 some are preempted")
    parts.choices["cancels"].add_argument("--tokens", type=int, default=60, help="most of a completion")
    parts.choices["cancels"].add_argument("--ways", nargs="+", choices=Canceller.WAYS, help="only these")
    parts.choices["requests"].add_argument("--count", type=int, default=1_000_000)
    parts.choices["requests"].add_argument("--slots", type=int, default=256, help="requests at once")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    if args.seed is None:
        args.seed = random.SystemRandom().getrandbits(32)
    say(f"{args.part}: seed {args.seed}")
    promises, begun = Promises(), time.monotonic()
    if args.part == "hosts":
        result = hosts(args, promises)
    else:
        with asyncio.Runner(loop_factory=new_loop) as runner:
            result = runner.run(ASYNC_PARTS[args.part](args, promises))
    line = {"part": args.part, "seed": args.seed, **result}
    print(json.dumps(line | {"seconds": round(time.monotonic() - begun), "broken": promises.broken}), flush=True)
    sys.exit(1 if promises.broken else 0)


def new_loop() -> asyncio.AbstractEventLoop:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


if __name__ == "__main__":
    main()
