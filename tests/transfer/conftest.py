"""A model, and folders of tokenizers to give it."""

import pytest
import torch

from tests.huggingface.tiny_models import save_model, save_tokenizer

OTHER_WORDS = {
    "text": "a question of the weather and of other things",
    "control_tokens": ["</s>", "<s>", "<pad>", "<extra>"],
}


@pytest.fixture(scope="session")
def new_tokenizer(tmp_path_factory):
    """Words of its own, another order of control tokens, and one more of these."""
    folder = tmp_path_factory.mktemp("new")
    save_tokenizer(folder, **OTHER_WORDS)
    return folder


@pytest.fixture(scope="session")
def untied(tmp_path_factory):
    return save_model("llama", tmp_path_factory.mktemp("models") / "old", dtype=torch.bfloat16)


@pytest.fixture(scope="session")
def tied(tmp_path_factory):
    return save_model("llama-tied", tmp_path_factory.mktemp("models") / "old")


@pytest.fixture(scope="session")
def donor(tmp_path_factory):
    """A model with the new vocabulary."""
    folder = save_model("qwen3", tmp_path_factory.mktemp("models") / "donor")
    save_tokenizer(folder, **OTHER_WORDS)
    return folder
