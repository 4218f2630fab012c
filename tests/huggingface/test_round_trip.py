"""Import then export gives the same folder: tensors bit for bit, and the same text generated."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatron_ext.huggingface.checkpoint_files import CheckpointFiles
from tests.huggingface.round_trips import round_trips
from tests.huggingface.tiny_models import COMPARED as MODELS
from tests.huggingface.tiny_models import save_model, tensors_of
from tests.process_group import run_ranks

BF16 = ("mistral",)
"""Saved in bf16; the others in fp32."""


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("trips")
    folders = {
        name: save_model(name, root / name, dtype=torch.bfloat16 if name in BF16 else torch.float32)
        for name in MODELS
    }
    run_ranks(1, round_trips, folders, root)
    return root


@pytest.mark.parametrize("name", MODELS)
def test_every_tensor_comes_back_bit_for_bit(root, name):
    before, after = tensors_of(root / name), tensors_of(root / "exported" / name)
    assert after.keys() == before.keys()
    for tensor, expected in before.items():
        assert after[tensor].dtype == expected.dtype
        assert torch.equal(after[tensor].view(torch.uint8), expected.view(torch.uint8)), tensor


@pytest.mark.parametrize("name", MODELS)
def test_what_is_not_a_tensor_comes_back_as_it_was(root, name):
    exported = root / "exported" / name
    for file in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (exported / file).read_bytes() == (root / name / file).read_bytes()
    before = dict(CheckpointFiles(root / name).config)
    after = dict(CheckpointFiles(exported).config)
    assert after.pop("torch_dtype") == before.pop("dtype")
    assert after == before
    assert len(list(exported.glob("*.safetensors"))) > 1


@pytest.mark.parametrize("name", MODELS)
def test_transformers_loads_it_and_generates_the_same_text(root, name):
    texts = [_generated(root / name), _generated(root / "exported" / name)]
    assert texts[0] == texts[1]
    assert len(texts[0]) > len("the other thing")


def _generated(folder):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder)
    chat = [{"role": "user", "content": "the other thing"}]
    ids = tokenizer.apply_chat_template(chat, return_tensors="pt", return_dict=True)
    output = model.generate(**ids, do_sample=False)
    return str(tokenizer.decode(output[0]))
