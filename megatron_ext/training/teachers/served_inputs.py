"""What a process of a teacher's own reads before the model is built: its tokenizer, and no text."""

from __future__ import annotations

from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.checkpoint_folder import find_checkpoint
from megatron_ext.training.checkpoint_tokenizer import teacher_doubts
from megatron_ext.training.config import DistillConfig
from megatron_ext.training.model_check import check_huggingface_teacher, check_if_huggingface
from megatron_ext.training.run_tokenizer import read_tokenizer
from megatron_ext.training.start_warnings import write_warnings


def read_served_teacher(config: DistillConfig, name: str) -> MegatronTokenizerText:
    """Check and read what ``config`` says of one teacher, for a process that serves it.

    What is doubtful goes to standard error.

    Returns:
        The teacher's tokenizer.

    Raises:
        MegatronExtError: Anything that can be known to be wrong before the model is built.
    """
    teacher, section = config.named_teachers[name], config.section_of(name)
    checkpoint = find_checkpoint(teacher.checkpoint, where=f"{section}.checkpoint")
    if teacher.library == "huggingface":
        check_huggingface_teacher(config, name, checkpoint)
    else:
        check_if_huggingface(checkpoint, teacher.model)
    tokenizer = read_tokenizer(teacher.tokenizer, f"{section}.tokenizer")
    doubts = teacher_doubts(config, name, checkpoint, tokenizer)
    write_warnings(f"{checkpoint}: {doubt}" for doubt in doubts)
    return tokenizer
