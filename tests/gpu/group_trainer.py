"""A trainer in a process of its own, on the first GPU:

    python group_trainer.py PORT SIZE FILE [--times N] [--die-after N | --shorten N]

It sends the tensors of a file of safetensors to a group of SIZE, in the file's order, ``--times``; without a GPU by
gloo. ``--die-after``: it kills itself behind so many tensors; ``--shorten``: of this one it sends 4 numbers.
"""

from __future__ import annotations

import argparse
import os
import signal
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("size", type=int)
    parser.add_argument("file")
    parser.add_argument("--times", type=int, default=1)
    parser.add_argument("--die-after", type=int)
    parser.add_argument("--shorten", type=int)
    args = parser.parse_args()
    is_gpu = torch.cuda.is_available()
    tensors = list(load_file(args.file, "cuda:0" if is_gpu else "cpu").values())
    if args.shorten is not None:
        tensors[args.shorten] = tensors[args.shorten].flatten()[:4].clone()
    if args.die_after is not None:
        del tensors[args.die_after :]
    patience = timedelta(seconds=60)
    store = dist.TCPStore("127.0.0.1", args.port, is_master=True, wait_for_workers=False, timeout=patience)
    backend: Any = dist.ProcessGroupNCCL if is_gpu else dist.ProcessGroupGloo
    group = backend(dist.PrefixStore("aengine-weights", store), 0, args.size, patience)
    options = dist.BroadcastOptions()
    options.rootRank = 0
    for _ in range(args.times):
        for tensor in tensors:
            group.broadcast([tensor], options).wait()
    if is_gpu:
        torch.cuda.synchronize()
    if args.die_after is not None:
        os.kill(os.getpid(), signal.SIGKILL)
    print("sent", flush=True)
    input()  # the store goes with this process


if __name__ == "__main__":
    main()
