"""What the command-line tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.run_files import PreloadedRun, write_config
from tests.training.tiny_run import teacher_run, write_corpus, write_rank_list


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Text, vocabularies, and a teacher trained for a step."""
    folder = tmp_path_factory.mktemp("cli")
    write_corpus(folder)
    write_rank_list(folder)
    config = write_config(folder, teacher_run(folder))
    PreloadedRun("distill", "--config", str(config), output=folder / "teacher.log").finish()
    return folder
