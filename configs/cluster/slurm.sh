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

mapfile -t nodes < <(scontrol show hostnames "$SLURM_JOB_NODELIST")
head=${nodes[0]}
address=$(srun --nodes=1 --ntasks=1 -w "$head" hostname -I | awk '{print $1}'):$port

# The head is also the owner of the run: this script runs there.
srun --nodes=1 --ntasks=1 --overlap -w "$head" \
    ray start --head --node-ip-address="${address%:*}" --port=$port --disable-usage-stats --block &
sleep 15
for node in "${nodes[@]:1}"; do
    srun --nodes=1 --ntasks=1 --overlap -w "$node" ray start --address="$address" --disable-usage-stats --block &
done
sleep 15

export RAY_ADDRESS=$address
if [ -e "$directory/run.db" ]; then
    mettle rl resume "$directory"
else
    mettle rl run "$config" --dir "$directory"
fi
