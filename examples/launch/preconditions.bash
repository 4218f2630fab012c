# Read by the scripts beside it: what they need, or one line that says what to set.

# need_files "$@": the files that the configurations here name, unless a flag names another.
need_files() {
  local file flag
  while read -r file flag; do
    if [[ ! -e $file && " $* " != *" $flag"[\ =]* ]]; then
      echo "$0: there is no $file in this folder: put yours there, or pass --config FILE with paths of" \
        "your own" >&2
      exit 2
    fi
  done <<FILES
text/train.jsonl --data-train
text/validation.jsonl --data-validation
tokenizers/student.json --tokenizer-model
tokenizers/teacher.model --teacher-tokenizer-model
teacher/checkpoints --teacher-checkpoint
FILES
}

# need_gpu: a GPU that torch sees, for as many processes as there are GPUs.
need_gpu() {
  if [[ $PROCESSES == gpu ]] && ! python -c 'import sys, torch; sys.exit(not torch.cuda.is_available())'; then
    echo "$0: torch sees no GPU here: set PROCESSES to a number, or take cpu.sh" >&2
    exit 2
  fi
}

# need_megatron_lm: a checkout of Megatron-LM, in MEGATRON_LM_PATH.
need_megatron_lm() {
  MEGATRON_LM_PATH=${MEGATRON_LM_PATH:?set it to a checkout of Megatron-LM}
  if [[ ! -d $MEGATRON_LM_PATH/megatron/training ]]; then
    echo "$0: MEGATRON_LM_PATH, $MEGATRON_LM_PATH, is no checkout of Megatron-LM" >&2
    exit 2
  fi
}
