#!/usr/bin/env bash
# A run on Slurm:
#
#   sbatch --nodes 4 tools/launch/slurm.sh --config RUN.yaml checkpoint.resume=latest [key=value]
#
# Put options of your cluster (partition, account, GPUs) into the command line of sbatch, which goes
# before what stands here. The nodes are looked at first, and the run goes on those that are fit.
# Ahead of the time limit the run is asked to save and leave, and the job is queued again; so it is
# when a rank or a node is lost, RESTARTS times at most. A mistake in the config ends the job.
#
# Variables: RANKS, of each node (default: its GPUs, or 1). NODES, the fewest that must be fit
# (default: all). RESTARTS (default 20). PYTHON (default .venv/bin/python). PORT (default 29400).
#SBATCH --job-name=megaframe
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=megaframe-%j.txt
# To this script alone, so many seconds ahead of the limit: two steps and a save have to fit in.
#SBATCH --signal=B:USR1@300
set -uo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

[ -n "${SLURM_JOB_ID:-}" ] || fail "this is no job of Slurm: start it with sbatch $0"
# sbatch runs a copy of this file; where it was called from is where the project is.
cd "${SLURM_SUBMIT_DIR:-.}" || fail "there is no folder ${SLURM_SUBMIT_DIR:-}"
[ -f tools/launch/node.py ] || fail "$PWD has no tools/launch/node.py: call sbatch in the project"
PYTHON=${PYTHON:-.venv/bin/python}
command -v "$PYTHON" > /dev/null || fail "there is no $PYTHON in $PWD: set PYTHON"

# Asked to leave: srun passes it on to the launcher of every node, and that to its ranks. It ends a
# wait. As long as there is no run, none begins.
asked=0 run=
trap 'asked=1; woken=1; [ -z "$run" ] || kill -USR1 "$run"' USR1

# One line for each node that is fit: its name. What is wrong with another is in the output. One
# that has not told after five minutes is not fit.
# shellcheck disable=SC2016
fit=$(srun --kill-on-bad-exit=0 --time=5 bash -c \
    '"$0" tools/launch/node.py --look "$@" >&2 && echo "$SLURMD_NODENAME"' "$PYTHON" "$@")
status=$?
# A mistake in the config, on all nodes.
if [ "$status" = 2 ] && [ -z "$fit" ]; then exit 2; fi
names=$(scontrol show hostnames "$SLURM_JOB_NODELIST") || fail "scontrol does not tell the nodes"
nodes=() sick=()
for name in $names; do
    if grep -qxF "$name" <<< "$fit"; then nodes+=("$name"); else sick+=("$name"); fi
done
[ ${#sick[@]} = 0 ] || echo "nodes that are not fit: ${sick[*]}" >&2
least=${NODES:-$((${#nodes[@]} + ${#sick[@]}))}
if [ ${#nodes[@]} -lt "$least" ]; then
    echo "error: ${#nodes[@]} nodes are fit and $least are needed; ask for spare ones with" \
        "--nodes and NODES=$least, or leave those out:" \
        "sbatch --exclude=$(IFS=,; echo "${sick[*]}")" >&2
    exit 4
fi

export PET_NNODES=${#nodes[@]}
export PET_NPROC_PER_NODE=${RANKS:-${SLURM_GPUS_ON_NODE:-1}}
# Names of Slurm's need not be names of hosts; this is where Slurm itself finds the node.
address=$(scontrol show node "${nodes[0]}" | grep -oP 'NodeAddr=\K\S+')
export PET_RDZV_ENDPOINT=${address:-${nodes[0]}}:${PORT:-29400}
export PET_RDZV_ID=$SLURM_JOB_ID-${SLURM_RESTART_COUNT:-0}
list=$(IFS=,; echo "${nodes[*]}")

status=138 woken=0
if [ "$asked" = 0 ]; then
    srun --nodes="$PET_NNODES" --ntasks="$PET_NNODES" --nodelist="$list" --kill-on-bad-exit=0 \
        "$PYTHON" tools/launch/node.py --no-doctor "$@" &
    run=$! woken=1
    [ "$asked" = 0 ] || kill -USR1 "$run"  # asked a moment ago
fi
while [ "$woken" = 1 ]; do
    woken=0
    wait "$run"
    status=$?
done

case $status in
    0 | 2) exit "$status" ;;
esac
count=${SLURM_RESTART_COUNT:-0}
if [ "$asked" = 1 ] && [ "$SECONDS" -lt 300 ]; then
    asked=0  # and not queued again for ever
    echo "asked to leave $SECONDS s after it began: a longer --time leaves more time to train" >&2
fi
if [ "$asked" = 1 ] || [ "$count" -lt "${RESTARTS:-20}" ]; then
    echo "status $status after $count restarts: the job is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
