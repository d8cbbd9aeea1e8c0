#!/bin/bash
# A run on the nodes of a Slurm job, placed by Ray: sbatch configs/cluster/slurm.sh FILE DIR
# FILE is a config with [deployment] engine = "ray", DIR a run directory in a folder that every node shares.
# A job that was cut off goes on when the same line is submitted again. Not run by us on a Slurm cluster.
#SBATCH --job-name=mettle
#SBATCH --nodes=2
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --time=24:00:00

set -euo pipefail
config=$1
directory=$2
port=6379
join_s=600

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")

on() { # a command on one node, beside what runs there
    srun --nodes=1 --ntasks=1 --overlap -w "$@"
}
address_of() { # the first address of a node
    on "$1" hostname -I | awk '{print $1}'
}
wait_for_nodes() { # until so many belong to the cluster
    python - "$address" "$1" "$join_s" <<'PYTHON'
import sys, time
import ray
address, count, limit_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
deadline = time.monotonic() + limit_s
while True:
    try:
        ray.init(address=address, logging_level="ERROR", log_to_driver=False)
        break
    except Exception:  # the head is still on its way
        if time.monotonic() > deadline:
            raise
        time.sleep(1)
while sum(node["Alive"] for node in ray.nodes()) < count:
    if time.monotonic() > deadline:
        sys.exit(f"error: not all {count} nodes have joined Ray within {limit_s:.0f} s")
    time.sleep(1)
PYTHON
}

# The head is also the owner of the run: this script runs there.
head=${nodes[0]}
address=$(address_of "$head"):$port
on "$head" ray start --head --node-ip-address="${address%:*}" --port=$port --disable-usage-stats --block &
wait_for_nodes 1
for node in "${nodes[@]:1}"; do
    on "$node" ray start --address="$address" --node-ip-address="$(address_of "$node")" --disable-usage-stats --block &
done
wait_for_nodes ${#nodes[@]}

export RAY_ADDRESS=$address
if [ -e "$directory/run.db" ]; then
    mettle rl resume "$directory"
else
    mettle rl run "$config" --dir "$directory"
fi
