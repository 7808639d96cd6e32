#!/bin/bash
# Peers of a run as an array of Slurm jobs, one for each GPU:
#   FARFLUNG_JOIN_URL="farflung://..." sbatch --array=0-3 examples/deploy/slurm.sh
#
# A job that is pre-empted or reaches its time leaves in good order and comes back by --requeue; each element of the array
# keeps a key of its own, so that it is the same peer afterwards.  Compute nodes can rarely be dialled from outside: such
# peers own nothing in a round, and one of the run's peers must be reachable elsewhere (docs/join.md).
#SBATCH --job-name=farflung
#SBATCH --gpus=1
#SBATCH --cpus-per-task=4
#SBATCH --mem=32G
#SBATCH --time=24:00:00
#SBATCH --requeue
#SBATCH --signal=B:INT@120
#SBATCH --output=farflung-%A_%a.log
set -euo pipefail
: "${FARFLUNG_JOIN_URL:?set it to the join URL}"

export FARFLUNG_HOME="${FARFLUNG_KEYS:-$HOME/.config/farflung}/array-${SLURM_ARRAY_TASK_ID:-0}"
mkdir -p "$FARFLUNG_HOME"

# In the background, so that this script hears the signal and hands it on.
farflung join --plain --log-json --listen off "$FARFLUNG_JOIN_URL" &
peer=$!
trap 'kill -TERM "$peer"' INT TERM
wait "$peer" && code=0 || code=$?
if kill -0 "$peer" 2>/dev/null; then # the wait was ended by the signal, and the peer is on its way out
    wait "$peer" && code=0 || code=$?
fi
exit "$code"
