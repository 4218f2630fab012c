#!/usr/bin/env bash
# The same run under Megatron-LM's own loop, on the GPUs of one node.
#
#   MEGATRON_LM_PATH=../Megatron-LM examples/launch/megatron_lm.sh
#   MEGATRON_LM_PATH=../Megatron-LM examples/launch/megatron_lm.sh --config run.yaml --lr 3e-4
#
# The configuration says what is learned; flags behind it are Megatron-LM's.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/preconditions.bash"
need_megatron_lm
PROCESSES=${PROCESSES:-gpu}
need_gpu
CHECKPOINTS=${CHECKPOINTS:-runs/megatron-lm/loop}
export PYTHONPATH="$MEGATRON_LM_PATH${PYTHONPATH:+:$PYTHONPATH}"
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1

if [[ " $* " != *" --config"* ]]; then
  need_files "$@"
  set -- --config "$HERE/megatron_lm.yaml" "$@"
fi
# With --dataloader-save a resumed run knows where its text goes on.
exec torchrun --standalone --nproc-per-node "$PROCESSES" "$HERE/pretrain_distill.py" \
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --dataloader-save "$CHECKPOINTS/text" \
  --log-interval 10 "$@"
