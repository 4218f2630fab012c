"""Classes that are called as others of the same name say what to pass instead."""

import inspect
import pickle

import pytest

from megatron_ext import (
    ArrowTextDataset,
    CrossTokenizerCollator,
    CrossTokenizerDistillationLossFn,
    MultiTeacherLossAggregator,
    TeacherCTSpec,
    TokenAligner,
    TokenizerConfig,
)
from megatron_ext.errors import ConfigError
from megatron_ext.losses import (
    CrossTokenizerDistillationLossConfig,
    CrossTokenizerDistillationLossDataDict,
)


@pytest.mark.parametrize(
    ("call", "instead"),
    [
        (
            lambda: TeacherCTSpec(teacher_tokenizer_name="qwen", projection_matrix_path="p.pt"),
            ["teacher_tokenizer_name=", "is tokenizer=", "is projection="],
        ),
        (lambda: TeacherCTSpec("qwen", 8), ["positional str", "is name="]),
        (
            lambda: CrossTokenizerCollator(pad_token_id=0, teacher_ct_specs=[]),
            ["pad_token_id=", "is teachers="],
        ),
        (
            lambda: MultiTeacherLossAggregator([None], [1.0]),
            ["positional list", "is teachers={name: TeacherObjective("],
        ),
        (
            lambda: MultiTeacherLossAggregator(loss_fns=[None], weights=[1.0]),
            ["loss_fns=, weights= is teachers="],
        ),
        (
            lambda: MultiTeacherLossAggregator(teachers={}, normalize_by_vocab=True),
            ["normalize_by_vocab= is vocab_normalisation="],
        ),
        (
            lambda: ArrowTextDataset(arrow_files="*.arrow", characters_per_sample=9),
            ["arrow_files= is data_files=", "is PackedTextDataset"],
        ),
        (
            lambda: CrossTokenizerDistillationLossFn({"teacher_weights": [1.0]}),
            ["teacher_weights= is weight= of each TeacherLossConfig"],
        ),
        (
            lambda: CrossTokenizerDistillationLossFn({"kl_chunk_shift": False}),
            ["kl_chunk_shift= is none: objectives 'partition_kl'"],
        ),
        (
            lambda: CrossTokenizerDistillationLossFn({}, token_aligner=None),
            ["token_aligner= is not needed"],
        ),
        (
            lambda: TokenAligner(teacher_tokenizer_name="a", student_tokenizer_name="b"),
            ["is student_tokenizer="],
        ),
        (
            lambda: CrossTokenizerDistillationLossConfig(loss_type="KL", temperature=1.0),
            ["loss_type=", "is gold_loss= and xtoken_loss="],
        ),
        (
            lambda: CrossTokenizerDistillationLossFn({"loss_type": "chunked_ce"}, [{}]),
            ["loss_type=", "'alm'"],
        ),
        (
            lambda: CrossTokenizerDistillationLossDataDict(input_ids=None, token_mask=None),
            ["input_ids= is student_logits=", "token_mask= is labels="],
        ),
    ],
    ids=[
        *("spec", "spec-by-position", "collator", "list", "losses"),
        *("vocabularies", "dataset", "teachers-in-one-mapping", "later-loss", "loss", "aligner"),
        *("loss-config", "loss-mapping", "inputs"),
    ],
)
def test_a_call_with_the_arguments_of_nemo_rl_names_ours(call, instead):
    with pytest.raises(ConfigError, match="NeMo RL") as raised:
        call()
    assert not [text for text in instead if text not in str(raised.value)]


def test_a_configuration_with_the_fields_of_megatron_names_ours():
    with pytest.raises(ConfigError, match=r"Megatron-LM's class .* tokenizer_model= is model=; "):
        TokenizerConfig(tokenizer_model="gpt2", use_gigatoken=True)
    with pytest.raises(ConfigError, match="or theirs for build_tokenizer"):
        TokenizerConfig(tokenizer_type="HuggingFaceTokenizer")


def test_an_argument_that_nobody_has_is_a_type_error():
    with pytest.raises(TypeError, match="max_len"):
        TeacherCTSpec(name="qwen", max_len=8)


def test_what_takes_the_place_of_an_argument_is_an_argument():
    fields = inspect.signature(TeacherCTSpec).parameters
    assert {"name", "tokenizer", "max_length", "projection", "pad_id"} <= fields.keys()
    assert pickle.loads(pickle.dumps(TeacherCTSpec(name="a", max_length=8))).max_length == 8
