"""What of a student learns is named exactly, or refused with the names that there are."""

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.config import LoraConfig, LossConfig
from megatron_ext.training.inputs import read_inputs
from tests.training.dry_run.planned_runs import planned_run
from tests.training.tiny_run import changed, student_run, write_corpus, write_rank_list


@pytest.mark.parametrize(
    ("targets", "layers"),
    [
        (("q_proj", "k_proj", "v_proj"), ("linear_qkv",)),
        (("down_proj", "o_proj"), ("linear_proj", "linear_fc2")),
        (("linear_fc1", "gate_proj", "up_proj"), ("linear_fc1",)),
        (("experts.down_proj", "linear_fc2"), ("linear_fc2", "experts.linear_fc2")),
    ],
)
def test_targets_may_have_the_names_of_either_library(targets, layers):
    assert LoraConfig(rank=2, targets=targets).targets == layers


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"targets": ("q_proj", "o_proj")}, "q_proj, k_proj, v_proj together"),
        ({"targets": ("linear_qkw",)}, "did you mean 'linear_qkv'"),
        ({"targets": ()}, "no targets"),
        ({"rank": 0}, "rank must be positive"),
        ({"alpha": -1.0}, "alpha must be positive"),
    ],
)
def test_adapters_that_cannot_be_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        LoraConfig(**{"rank": 2, **options})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"training": {"trainable": ("embedings", "head")}}, "did you mean 'embeddings'"),
        ({"training": {"trainable": ()}}, "nothing of the student would learn"),
        ({"training": {"trainable": ("head",)}}, "the same weights.* got head alone"),
    ],
)
def test_parts_that_cannot_learn_are_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        changed(planned_run(), **changes)


EXPERTS = {"num_experts": 4, "moe_ffn_hidden_size": 24}
SHARED = {"moe_shared_expert_intermediate_size": 16}


@pytest.mark.parametrize(
    ("student", "targets", "parts", "message"),
    [
        ({}, ("experts.linear_fc1",), None, "no experts.* got experts.linear_fc1"),
        ({}, None, ("norms", "routers"), "no experts.* got routers"),
        (EXPERTS, ("linear_qkv", "linear_fc2"), None, "none is shared.*experts.linear_fc2"),
    ],
)
def test_layers_that_a_student_lacks_are_refused(student, targets, parts, message):
    lora = LoraConfig(rank=2, targets=targets) if targets else None
    with pytest.raises(ConfigError, match=message):
        changed(planned_run(), student=student, training={"trainable": parts}, lora=lora)


def test_adapters_of_a_student_with_experts_are_of_attention_and_of_what_is_shared():
    changed(planned_run(), student=EXPERTS, lora=LoraConfig(rank=2))
    shared = LoraConfig(rank=2, targets=("linear_fc1",))
    changed(planned_run(), student=EXPERTS | SHARED, lora=shared)


def test_an_untied_head_learns_alone_and_adapters_may_have_parts_beside_them():
    changed(
        planned_run(),
        student={"untie_embeddings_and_output_weights": True},
        training={"trainable": ("head",)},
        lora=LoraConfig(rank=2),
        loss={"weighting": "gradient_magnitude"},
    )


@pytest.mark.parametrize(
    "changes", [{"lora": LoraConfig(rank=2)}, {"training": {"trainable": ("norms",)}}]
)
def test_what_learns_beside_random_weights_is_warned_of(changes, tmp_path):
    write_corpus(tmp_path)
    write_rank_list(tmp_path)
    loss = LossConfig(objective="next_token")
    config = changed(student_run(tmp_path, "run"), teacher=None, loss=loss)
    assert read_inputs(config, world_size=1).warnings == []
    (warning,) = read_inputs(changed(config, **changes), world_size=1).warnings
    assert "drawn at random; set initial_checkpoint" in warning
