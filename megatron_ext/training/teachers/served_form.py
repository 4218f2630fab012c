"""The form of what a remote teacher sends; the same on each side."""

from __future__ import annotations

from megatron_ext.teachers.target_form import Precision, TargetForm
from megatron_ext.tokenizers import MegatronTokenizerText
from megatron_ext.training.run_plan import TeacherPlan


def served_form(teacher: TeacherPlan, tokenizer: MegatronTokenizerText) -> TargetForm:
    """The form of a teacher's targets.

    Raises:
        ConfigError: There are not so many tokens to send.
    """
    serving = teacher.config.serving
    precision: Precision | None = serving.target_precision
    if precision is None and serving.targets == "hidden":
        precision = teacher.training.precision
    return TargetForm.of(
        serving.targets,
        precision=precision,
        top_k=serving.top_k,
        hidden_size=teacher.config.model.hidden_size,
        vocab_size=tokenizer.vocab_size,
    )


def described(name: str, placement: str, form: TargetForm) -> str:
    """One line for a person: ``teacher big on its own ranks: hidden 64 in fp32, 256 bytes ...``."""
    parts = " + ".join(f"{width:,} {part}" for part, width in form.parts.items())
    return f"teacher {name} ({placement}): {form}, {form.bytes_per_token:,} bytes a token = {parts}"
