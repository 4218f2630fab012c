"""A verb about one teacher finds it, or says which there are."""

from __future__ import annotations

import dataclasses

import pytest

from megatron_ext.cli.output import named_teacher
from megatron_ext.errors import ConfigError, UnknownNameError
from tests.training.dry_run.planned_runs import planned_run

ONE = planned_run()
assert ONE.teacher is not None
TWO = dataclasses.replace(ONE, teacher=None, teachers={"a": ONE.teacher, "b": ONE.teacher})


def test_the_only_teacher_needs_no_name() -> None:
    assert named_teacher(ONE, None, what_for="serve") == "teacher"
    assert named_teacher(TWO, "b", what_for="serve") == "b"


def test_what_is_missing_or_wrong_is_said_with_what_there_is() -> None:
    loss = dataclasses.replace(ONE.loss, objective="next_token")
    alone = dataclasses.replace(ONE, teacher=None, loss=loss)
    with pytest.raises(ConfigError, match="no teacher to serve"):
        named_teacher(alone, None, what_for="serve")
    with pytest.raises(ConfigError, match=r"several teachers.*one of a, b"):
        named_teacher(TWO, None, what_for="serve")
    with pytest.raises(UnknownNameError, match=r"no such teacher.*'?c'?.*one of a, b"):
        named_teacher(TWO, "c", what_for="cache")
