"""What a process of a teacher's own reads before the model is built: its tokenizer, and no text."""

from __future__ import annotations

from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.checkpoint_tokenizer import teacher_doubts
from megatron_ext.training.model_check import check_huggingface_teacher, check_if_huggingface
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.training.run_tokenizer import read_tokenizer
from megatron_ext.training.start_warnings import write_warnings


def read_served_teacher(teacher: TeacherPlan) -> MegatronTokenizerText:
    """Check and read what a configuration says of one teacher, for a process that serves it.

    What is doubtful goes to standard error.

    Returns:
        The teacher's tokenizer.

    Raises:
        MegatronExtError: Anything that can be known to be wrong before the model is built.
    """
    checkpoint = teacher.checkpoint
    if teacher.config.library == "huggingface":
        check_huggingface_teacher(teacher)
    else:
        check_if_huggingface(checkpoint, teacher.config.model)
    tokenizer = read_tokenizer(teacher.config.tokenizer, f"{teacher.section}.tokenizer")
    doubts = teacher_doubts(teacher, tokenizer)
    write_warnings(f"{checkpoint}: {doubt}" for doubt in doubts)
    return tokenizer
