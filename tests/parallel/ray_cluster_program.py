"""A Ray cluster of several nodes on this machine, in a process of its own: Ray has handlers and hooks for its end.

    python ray_cluster_program.py CPUS_OF_EACH_NODE...

Prints its address, then obeys lines: "remove N" kills the N-th node that was ever added, "add CPUS" adds one. Each is
answered by "done". It ends with stdin.
"""

from __future__ import annotations

import sys

from ray.cluster_utils import Cluster

HEAD = {
    "num_cpus": 0,
    "include_dashboard": False,
    "_system_config": {
        "health_check_initial_delay_ms": 500,
        "health_check_period_ms": 500,
        "health_check_failure_threshold": 2,
    },
}


def main() -> None:
    cluster = Cluster(initialize_head=True, head_node_args=HEAD)
    nodes = [cluster.add_node(num_cpus=int(cpus), wait=False) for cpus in sys.argv[1:]]
    cluster.wait_for_nodes()
    print(f"address {cluster.address}", flush=True)
    for line in sys.stdin:
        command, number = line.split()
        if command == "remove":
            cluster.remove_node(nodes[int(number)], allow_graceful=False)
        else:
            nodes.append(cluster.add_node(num_cpus=int(number)))
        print("done", flush=True)
    cluster.shutdown()


if __name__ == "__main__":
    main()
