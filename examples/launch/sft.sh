#!/usr/bin/env bash
# SFT by Megatron-LM's own script on the masks of our prompt formats, on the GPUs of one node.
#
#   MEGATRON_LM_PATH=../Megatron-LM PRETRAINED=runs/pretrain/checkpoints \
#     DATA=conversations.jsonl TOKENIZER=tokenizer.model examples/launch/sft.sh \
#     --tokenizer-library sentencepiece --tokenizer-prompt-format mistral
#
# The sizes of the model are those of the checkpoint. Flags behind the name of this script come last:
# --sft-loss-mode full trains every token of a conversation.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/preconditions.bash"
need_megatron_lm
TOKENIZER=${TOKENIZER:?set it to a tokenizer file or its folder}
DATA=${DATA:?set it to JSON lines of conversations}
PRETRAINED=${PRETRAINED:?set it to checkpoints of Megatron-LM to start from}
PROCESSES=${PROCESSES:-gpu}
need_gpu
CHECKPOINTS=${CHECKPOINTS:-runs/sft/checkpoints}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec torchrun --standalone --nproc-per-node "$PROCESSES" \
  -m megatron_ext run "$MEGATRON_LM_PATH/pretrain_gpt.py" --sft \
  --tokenizer-model "$TOKENIZER" --tokenizer-mode sft --tokenizer-prompt-format auto \
  --no-use-tokenizer-model-from-checkpoint-args --use-checkpoint-args \
  --data-path "$DATA" --split 99,1,0 --sft-loss-mode assistant --calculate-per-token-loss \
  --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 1 --global-batch-size 64 --train-iters 1000 --bf16 \
  --lr 1e-5 --lr-decay-style cosine --lr-warmup-iters 20 --clip-grad 1.0 \
  --use-distributed-optimizer --eval-iters 4 --eval-interval 100 --log-interval 10 \
  --pretrained-checkpoint "$PRETRAINED" --save "$CHECKPOINTS" --load "$CHECKPOINTS" \
  --save-interval 100 "$@"
