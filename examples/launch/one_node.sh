#!/usr/bin/env bash
# One node: a process for each of its GPUs.
#
#   examples/launch/one_node.sh                              the configuration beside this script
#   PROCESSES=4 examples/launch/one_node.sh --config run.yaml
#
# The same command goes on from the newest checkpoint, with another number of processes too. A
# process that fails ends the others; they are started again up to RESTARTS times.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/preconditions.bash"
PROCESSES=${PROCESSES:-gpu}
need_gpu
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
# What tensor parallelism sends then overlaps with what it computes, as megatron-core advises.
export CUDA_DEVICE_MAX_CONNECTIONS=1

if [[ " $* " != *" --config"* ]]; then
  need_files "$@"
  set -- --config "$HERE/one_node.yaml" "$@"
fi
exec torchrun --standalone --nproc-per-node "$PROCESSES" --max-restarts "${RESTARTS:-0}" \
  -m megatron_ext "${VERB:-distill}" "$@"
