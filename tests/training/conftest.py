"""What the tests of runs share."""

import pytest

from tests.training.tiny_run import write_corpus, write_rank_list


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the text and the vocabularies of tiny runs."""
    folder = tmp_path_factory.mktemp("runs")
    write_corpus(folder)
    write_rank_list(folder)
    return folder
