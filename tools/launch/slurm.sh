#!/usr/bin/env bash
# A run on Slurm:
#
#   sbatch --nodes 4 tools/launch/slurm.sh --config RUN.yaml checkpoint.resume=latest [key=value]
#
# Give the options of your cluster (partition, account, GPUs) on the command line of sbatch, which
# overrides the options below. The nodes are checked first, and the run uses those that are fit.
# Ahead of the time limit the run is asked to save and leave, and the job is requeued. It is also
# requeued when a rank or a node is lost, at most RESTARTS times. A mistake in the config ends the
# job.
#
# Variables: RANKS, ranks per node (default: its GPUs, or 1). NODES, the fewest nodes that must be
# fit (default: all). RESTARTS (default 20). PYTHON (default .venv/bin/python). PORT (29400).
#SBATCH --job-name=megaframe
#SBATCH --nodes=1
#SBATCH --ntasks-per-node=1
#SBATCH --exclusive
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=megaframe-%j.txt
# Signals this script only, 300 seconds ahead of the limit: time for two steps and a save.
#SBATCH --signal=B:USR1@300
set -uo pipefail

fail() {
    echo "error: $1" >&2
    exit 2
}

case " $* " in
    *" --help "* | *" -h "*)
        sed -n '2,/^#SBATCH/ { /^#SBATCH/! s/^# \{0,1\}//p; }' "$0"
        exit 0
        ;;
esac
[ -n "${SLURM_JOB_ID:-}" ] || fail "this is no job of Slurm: start it with sbatch $0"
# sbatch runs a copy of this file, so the project is found by the folder that it was called in.
cd "${SLURM_SUBMIT_DIR:-.}" || fail "there is no folder ${SLURM_SUBMIT_DIR:-}"
[ -f tools/launch/node.py ] || fail "$PWD has no tools/launch/node.py: call sbatch in the project"
PYTHON=${PYTHON:-.venv/bin/python}
command -v "$PYTHON" > /dev/null || fail "there is no $PYTHON in $PWD: set PYTHON"

# Asked to leave: srun passes the signal to the launcher of every node, which passes it to its
# ranks. The signal also interrupts `wait`. If no run has begun yet, none is started.
asked=0 run=
trap 'asked=1; woken=1; [ -z "$run" ] || kill -USR1 "$run"' USR1

# The names of the nodes that are fit, one per line. What is wrong with the others is in the output.
# A node that has not answered after five minutes is not fit.
# shellcheck disable=SC2016
fit=$(srun --kill-on-bad-exit=0 --time=5 bash -c \
    '"$0" tools/launch/node.py --look "$@" >&2 && echo "$SLURMD_NODENAME"' "$PYTHON" "$@")
status=$?
# All nodes found a mistake in the config.
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
# Slurm's node names need not be host names; this is the address by which Slurm reaches the node.
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
    asked=0  # counts as a restart, so that the job is not requeued for ever
    echo "asked to leave $SECONDS s after it began: a longer --time leaves more time to train" >&2
fi
if [ "$asked" = 1 ] || [ "$count" -lt "${RESTARTS:-20}" ]; then
    echo "status $status after $count restarts: the job is queued again" >&2
    scontrol requeue "$SLURM_JOB_ID" && exit 0
fi
exit "$status"
