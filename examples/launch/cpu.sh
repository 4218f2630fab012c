#!/usr/bin/env bash
# Processes on the CPU, over gloo: the same layers, schedules and checkpoints as on GPUs.
#
#   examples/launch/cpu.sh                              two processes, the configuration beside this
#   PROCESSES=4 examples/launch/cpu.sh --config run.yaml --pipeline-model-parallel-size 2
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/preconditions.bash"
PROCESSES=${PROCESSES:-2}
CORES=$(getconf _NPROCESSORS_ONLN)
# Processes that take all cores each would wait for one another.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-$((CORES > PROCESSES ? CORES / PROCESSES : 1))}
# None of the GPUs that may be there.
export CUDA_VISIBLE_DEVICES=

if [[ " $* " != *" --config"* ]]; then
  need_files "$@"
  set -- --config "$HERE/cpu.yaml" "$@"
fi
exec torchrun --standalone --nproc-per-node "$PROCESSES" -m megatron_ext "${VERB:-distill}" "$@"
