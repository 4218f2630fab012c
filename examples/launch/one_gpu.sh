#!/usr/bin/env bash
# One process on one GPU.
#
#   examples/launch/one_gpu.sh                              the configuration beside this script
#   examples/launch/one_gpu.sh --config run.yaml --lr 3e-4  another one, and any flag of the verb
#
# The same command goes on from the newest checkpoint.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/preconditions.bash"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}

if [[ " $* " != *" --config"* ]]; then
  need_files "$@"
  set -- --config "$HERE/one_gpu.yaml" "$@"
fi
exec python -m megatron_ext "${VERB:-distill}" "$@"
