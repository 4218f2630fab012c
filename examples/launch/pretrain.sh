#!/usr/bin/env bash
# Pretraining by Megatron-LM's own script, with the tokenizer of any library, on the GPUs of a node.
#
#   MEGATRON_LM_PATH=../Megatron-LM DATA=text/train_text_document TOKENIZER=tokenizer.model \
#     examples/launch/pretrain.sh --tokenizer-library sentencepiece
#
# DATA is the prefix that megatron-ext tokenize wrote, with the same tokenizer. Flags behind the
# name of this script come last, so that they override those below.
set -euo pipefail

HERE=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
source "$HERE/preconditions.bash"
need_megatron_lm
TOKENIZER=${TOKENIZER:?set it to a tokenizer file or its folder}
DATA=${DATA:?set it to the prefix of a .bin and its .idx}
PROCESSES=${PROCESSES:-gpu}
need_gpu
CHECKPOINTS=${CHECKPOINTS:-runs/pretrain/checkpoints}
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-8}
export CUDA_DEVICE_MAX_CONNECTIONS=1

exec torchrun --standalone --nproc-per-node "$PROCESSES" \
  -m megatron_ext run "$MEGATRON_LM_PATH/pretrain_gpt.py" \
  --tokenizer-model "$TOKENIZER" --tokenizer-mode text --data-path "$DATA" --split 99,1,0 \
  --num-layers 24 --hidden-size 2048 --num-attention-heads 16 --group-query-attention \
  --num-query-groups 8 --swiglu --normalization RMSNorm --disable-bias-linear \
  --position-embedding-type rope --untie-embeddings-and-output-weights \
  --seq-length 4096 --max-position-embeddings 4096 --attention-dropout 0 --hidden-dropout 0 \
  --micro-batch-size 1 --global-batch-size 256 --train-iters 10000 --bf16 \
  --lr 3e-4 --min-lr 3e-5 --lr-decay-style cosine --lr-warmup-iters 200 --clip-grad 1.0 \
  --use-distributed-optimizer --eval-iters 10 --eval-interval 500 --log-interval 10 \
  --save "$CHECKPOINTS" --load "$CHECKPOINTS" --save-interval 500 "$@"
