"""Every row of the table of exclusions refuses a run with both features, and none with one."""

import copy

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.teachers.target_form import TargetForm
from megatron_ext.training.configuration.exclusions import EXCLUSIONS, check_exclusions
from megatron_ext.training.run_folder import config_values
from tests.training.test_loss_configuration import MODEL, TEACHER, check, config_of
from tests.training.tiny_run import LINEAR_ATTENTION

OWN_RANKS = {"placement": "own_ranks", "serving": {"ranks": 1}}
HEADS = {"objective": "dskd", "options": {"projectors": "heads"}}
PARALLEL = {
    "context_parallel_size": 2,
    "sequence_parallel": True,
    "virtual_pipeline_model_parallel_size": 2,
    "overlap_param_gather": True,
}
NEEDED = {
    "sequence_parallel": {"tensor_model_parallel_size": 2},
    "virtual_pipeline_model_parallel_size": {"pipeline_model_parallel_size": 2},
    "overlap_param_gather": {"use_distributed_optimizer": True, "overlap_grad_reduce": True},
}
"""By axis, what it cannot be without."""

ENGINE = {"kind": "vllm", "url": ["http://localhost:8000"]}

ON = {
    "teachers": {"teachers": {"a": {}}},
    "projection": {"projection": "p"},
    "teacher.projection": {"teacher": {"projection": "p"}},
    "teacher.cache": {"teacher": {"cache": "c"}},
    "teacher.offload": {"teacher": {"offload": True}},
    "teacher.ema_decay": {"teacher": {"ema_decay": 0.9, "checkpoint": ""}},
    "teacher.library: huggingface": {"teacher": {"library": "huggingface"}},
    "teacher.weight_precision": {"teacher": {"library": "huggingface", "weight_precision": "int8"}},
    "teacher.placement: own_ranks": {"teacher": OWN_RANKS},
    "teacher.placement: own_ranks or teacher.placement: server": {"teacher": OWN_RANKS},
    "teacher.placement other than student_ranks": {"teacher": OWN_RANKS},
    "the option projectors: heads of dskd": {"loss": HEADS},
    "cached or remote targets that are not hidden": {},
    "loss.teacher_mode other than sum": {"loss": {"teacher_mode": "select_teacher"}},
    "loss.teacher_weights other than static": {"loss": {"teacher_weights": "entropy"}},
    "loss.linear": {"loss": {"linear": True}},
    "loss.learned_projection": {"loss": {"learned_projection": True}},
    "loss.kd_weight other than 1.0": {"loss": {"kd_weight": 0.0}},
    "loss.ce_weight other than 1.0": {"loss": {"ce_weight": 2.0}},
    "loss.kd_weight: 0.0": {"loss": {"kd_weight": 0.0}},
    "loss.ce_weight: 0.0": {"loss": {"ce_weight": 0.0}},
    "loss.linear with a ce_weight other than 0": {"loss": {"linear": True}},
    "data.rollouts without engine": {"data": {"train": ["x"], "rollouts": {}}},
    "data.rollouts.engine": {
        "data": {"train": ["x"], "rollouts": {"engine": ENGINE}},
        "initial_checkpoint": "c",
    },
    "no initial_checkpoint": {"initial_checkpoint": None},
    "teacher.engine": {
        "teacher": {"placement": "engine", "engine": ENGINE, "serving": {"targets": "label"}}
    },
    "an objective that reads where words begin": {"loss": {"objective": "alm"}},
    "teacher.sources": {"teacher": {"sources": ["x"]}},
    "data.rollouts": {"data": {"train": ["x"], "rollouts": {}}},
    "loss.weighting: matched": {"loss": {"weighting": "matched"}},
    "loss.weighting: gradient_magnitude": {"loss": {"weighting": "gradient_magnitude"}},
    "loss.weighting other than fixed": {"loss": {"weighting": "scheduled"}},
    "training.vocabulary_layout: co_sharded": {"training": {"vocabulary_layout": "co_sharded"}},
    "training.recompute_granularity": {"training": {"recompute_granularity": "selective"}},
    "training.recompute_granularity: full": {
        "training": {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    },
    "an objective that reads states of the student below its last layer": {
        "loss": {"objective": "hidden_mse", "options": {"layers": [[-1, -1], [2, 2]]}}
    },
    "training.trainable": {"training": {"trainable": ("layers",)}},
    "training.trainable without layers, and no lora": {"training": {"trainable": ("norms",)}},
    "lora": {"lora": {"rank": 2}},
    "evaluation.tasks": {"evaluation": {"tasks": {"mmlu": {"data": "d"}}}},
    "several teachers": {"teachers": {"a": {}, "b": {}}},
    "an objective without a teacher": {"loss": {"objective": "next_token"}},
    "an objective without a projection": {"loss": {"objective": "uld"}},
    "an objective that learns no projection": {"loss": {"objective": "alm"}},
    "an objective without a linear form": {"loss": {"objective": "dskd"}},
    "an objective or an option that needs whole sequences": {
        "loss": {"objective": "alm", "options": {"merge": "words"}}
    },
    "num_experts of a teacher on the student's ranks": {
        "teacher": {"model": MODEL | {"num_layers": 4, "num_experts": 4}}
    },
    "student.linear_attention_freq": {"student": LINEAR_ATTENTION},
    "student.attention_output_gate": {"student": {"attention_output_gate": True}},
    "student.num_experts": {"student": {"num_experts": 4}},
    "a student's experts shared by replicas": {
        "student": {"num_experts": 4},
        "parallel": {"expert_model_parallel_size": 2},
    },
    "data.validation under Megatron-LM's loop": {"data": {"train": ["x"], "validation": ["y"]}},
    "a rotary_seq_len_interpolation_factor that is not a whole number": {
        "student": {"rotary_seq_len_interpolation_factor": 1.5}
    },
    "student.post_layernorms": {"student": {"post_layernorms": True}},
    "student.scale_embeddings": {"student": {"scale_embeddings": True}},
    "student.gate_activation other than silu": {"student": {"gate_activation": "gelu_tanh"}},
    "student.gate_limit": {"student": {"gate_limit": 7.0}},
    "student.gated_offset other than 0.0": {"student": {"gated_offset": 1.0}},
    "student.kv_lora_rank": {
        "student": {
            "kv_lora_rank": 12,
            "qk_head_dim": 10,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 6,
        }
    },
    "student.attention_cap": {"student": {"attention_cap": 50.0}},
    "student.logit_cap": {"student": {"logit_cap": 30.0}},
    "logit_cap of a teacher": {"teacher": {"model": MODEL | {"logit_cap": 30.0}}},
    "an objective that reads heads: dskd": {"loss": {"objective": "dskd"}},
    "student.attention_sinks": {"student": {"attention_sinks": True}},
    "student.softmax_scale": {"student": {"softmax_scale": 0.5}},
    "student.local_rotary_base": {
        "student": {"local_rotary_base": 10000, "full_attention_interval": 6}
    },
    "a window_size below seq_length": {"student": {"window_size": 3}},
    "student.rotary_divisors": {"student": {"rotary_divisors": [1.0, 2.0]}},
    "student.unrotated_interval": {"student": {"unrotated_interval": 4}},
    "student.qk_layernorm_over other than head": {
        "student": {"qk_layernorm": True, "qk_layernorm_over": "heads"}
    },
    "student.parallel_residual": {"student": {"parallel_residual": True}},
    "student.add_bias_linear": {"student": {"add_bias_linear": True}},
    "student.residual_multiplier other than 1.0": {"student": {"residual_multiplier": 0.22}},
    "student.embedding_multiplier other than 1.0": {"student": {"embedding_multiplier": 12.0}},
    "student.logits_scaling other than 1.0": {"student": {"logits_scaling": 8.0}},
    "teacher": {},
    "Megatron-LM's loop": {},
} | {
    f"parallel.{axis}{'' if value is True else ' other than 1'}": {
        "parallel": {axis: value, **NEEDED.get(axis, {})}
    }
    for axis, value in PARALLEL.items()
}
"""By the name of a feature, without its marks, what asks for it."""


def run_with(*features):
    """A run that asks for ``features``, read as from a file."""
    asked = [ON[feature.name.replace("`", "")] for feature in features]
    keeps_teacher = any(feature.name == "`teacher`" for feature in features)
    values = {"training": {"train_iters": 5}}
    if keeps_teacher or not any("teachers" in changes for changes in asked):
        values["teacher"] = {}
    for changes in asked:
        for section, inner in changes.items():
            here = values.get(section)
            values[section] = {**here, **inner} if isinstance(here, dict) else inner
    values["student"] = MODEL | values.get("student", {}) | {"num_layers": 4}
    if "teacher" in values:
        values["teacher"] = _teacher(values["teacher"])
    teachers = {name: _teacher(its) for name, its in values.get("teachers", {}).items()}
    return config_of(**values | {"teachers": teachers})


def _teacher(changes):
    return copy.deepcopy(TEACHER) | {"model": MODEL | {"num_layers": 4}} | changes


def refuse(config, row):
    if row.stage == "targets":
        form = TargetForm.of("label", precision=None, top_k=4, hidden_size=8, vocab_size=100)
        forms = dict.fromkeys(config.named_teachers, form)
        check_exclusions(config, "targets", forms=forms)
    elif row.stage == "megatron_lm":
        check_exclusions(config, "megatron_lm")
    else:
        check(config)


def _name(row):
    return f"{row.feature.name}-{row.other.name}".replace("`", "")


@pytest.mark.parametrize("row", EXCLUSIONS, ids=_name)
def test_a_run_with_both_features_is_refused_by_the_names_of_both(row):
    with pytest.raises(ConfigError) as caught:
        refuse(run_with(row.feature, row.other), row)
    text = str(caught.value)
    assert row.why in text
    assert row.remedy in text
    assert " with " in text
    for feature in (row.feature, row.other):
        place = (feature.key or "").replace("{teacher}", "teacher")
        assert "{" in place or place in text


@pytest.mark.parametrize(
    "feature",
    {
        feature.name: feature
        for row in EXCLUSIONS
        for feature in (row.feature, row.other)
        if row.stage in ("configuration", "objectives")
    }.values(),
    ids=lambda feature: feature.name.replace("`", ""),
)
def test_a_run_with_one_of_them_is_not(feature):
    check(run_with(feature))


def test_the_line_of_the_key_is_named():
    values = config_values(config_of())
    values["loss"] |= {"linear": True, "teacher_mode": "select_teacher"}
    with pytest.raises(ConfigError, match=r"^loss\.teacher_mode: the linear form"):
        config_of(**values)
