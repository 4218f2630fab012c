"""What the command-line tests share."""

from functools import cache

import pytest

from megatron_ext.tokenizers import build_tokenizer
from tests.cli.run_files import PreloadedRun, write_config
from tests.training.tiny_run import teacher_run, write_corpus, write_rank_list


@pytest.fixture(scope="session")
def folder(tmp_path_factory):
    """Text, vocabularies, and a teacher trained for a step."""
    folder = tmp_path_factory.mktemp("cli")
    write_corpus(folder)
    write_rank_list(folder)
    config = write_config(folder, teacher_run(folder))
    PreloadedRun("distill", "--config", str(config), output=folder / "teacher.log").finish()
    return folder


@pytest.fixture
def built_once(monkeypatch):
    """``inspect`` builds a tokenizer when it is first named, for all tests."""
    monkeypatch.setattr("megatron_ext.cli.inspect.build_tokenizer", _built)


_built = cache(build_tokenizer)
