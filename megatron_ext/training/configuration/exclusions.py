"""The table of features that a run cannot combine, which docs/configuration.md prints.

A row is checked as soon as its features are known: most with the configuration, some with the
objectives, with the form of a teacher's targets, or where Megatron-LM's loop takes the run.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Final

from megatron_ext.training.configuration import features
from megatron_ext.training.configuration.features import Exclusion, Setting, Stage, key_feature

if TYPE_CHECKING:
    from megatron_ext.losses import Objective
    from megatron_ext.teachers.target_form import TargetForm
    from megatron_ext.training.configuration.config import DistillConfig


def check_exclusions(
    config: DistillConfig,
    stage: Stage,
    *,
    objectives: Mapping[str, Objective] | None = None,
    forms: Mapping[str, TargetForm] | None = None,
) -> None:
    """Refuse a run that asks for features which do not go together.

    Args:
        stage: Stage whose rows are checked.
        objectives: Objectives by teacher, at the stages ``objectives`` and ``targets``.
        forms: Forms of targets by teacher, at the stage ``targets``.

    Raises:
        ConfigError: The run asks for two features of a row.
    """
    for row in EXCLUSIONS:
        for name in (*config.named_teachers,) or (None,):
            if row.stage == stage:
                row.check(
                    Setting(
                        config=config,
                        teacher_name=name,
                        objectives=objectives or {},
                        forms=forms or {},
                    )
                )


_BY_IDS: Final = "set training.vocabulary_layout to original"
_ON_CHECKPOINTS: Final = "leave the tasks out, and call megatron-ext evaluate on a checkpoint"
_NOT_CUT: Final = "between two steps a student in this layout does not read texts of any length"
_IN_STEP: Final = (
    "replicas that share experts pass in step, and between two steps each has as many as it needs"
)
_BY_SERVERS: Final = "change the layout, or have servers sample (data.rollouts.engine)"
_SETS_ITSELF: Final = "the weighting sets this weight itself"
_NO_FLAG: Final = (
    "Megatron-LM has no flag for this, so that its checkpoints would be of another model"
)
_OWN_LOOP: Final = "only megatron-ext distill has this, not Megatron-LM's loop"
_IN_OWN_LOOP: Final = "leave it out, or train with megatron-ext distill"

_CUTS: Final = (
    features.CONTEXT,
    features.SEQUENCE,
    features.INTERLEAVED,
    features.LATE_GATHER,
)
"""Layouts in which a student reads no text of any length between two steps."""

EXCLUSIONS: Final[tuple[Exclusion, ...]] = (
    # Teachers.
    Exclusion(
        features.TEACHER,
        features.TEACHERS,
        "teachers are given twice",
        "put the one teacher among the others",
    ),
    *(
        Exclusion(
            features.PROJECTION,
            other,
            "a projection is of one teacher",
            "name the file in the section of the teacher",
        )
        for other in (features.TEACHERS, features.TEACHERS_PROJECTION)
    ),
    Exclusion(
        features.CACHE,
        features.REMOTE,
        "a teacher whose targets are cached is nowhere",
        "remove one of them",
    ),
    *(
        Exclusion(
            features.OFFLOAD,
            other,
            "there is nothing to make room for where the teacher is",
            "remove offload",
        )
        for other in (features.CACHE, features.ON_OTHER_DEVICES)
    ),
    *(
        Exclusion(
            features.AVERAGE,
            other,
            "an average of the student is on the student's ranks, in its layout and its library",
            "leave one of them out",
        )
        for other in (features.CACHE, features.REMOTE, features.TRANSFORMERS)
    ),
    Exclusion(
        features.AVERAGE,
        features.OFFLOAD,
        "the average of the student changes with every update, and offloaded weights do not",
        "remove offload",
    ),
    Exclusion(
        features.AVERAGE,
        features.LATE_GATHER,
        "the student's weights are averaged before overlap_param_gather has gathered them",
        "set overlap_param_gather to false",
    ),
    Exclusion(
        features.WEIGHT_PRECISION,
        features.OFFLOAD,
        "rounded weights do not move between a device and the host",
        "remove one of them",
    ),
    *(
        Exclusion(
            features.STARTS_FROM_HEADS,
            other,
            "projectors that start from the heads need the teacher's model",
            "set the option projectors to random, or have the teacher on the student's ranks",
        )
        for other in (features.CACHE, features.REMOTE)
    ),
    Exclusion(
        features.ENGINE,
        features.WORD_BEGINS,
        "an engine does not say how likely it is that a word begins",
        "set the objective's options debias to false and merge to none",
        "objectives",
    ),
    *(
        Exclusion(
            combined,
            features.NO_LOGITS,
            "how the teachers are combined reads their logits, which are not there",
            "have the targets hidden, or leave it out",
            "targets",
        )
        for combined in (features.MODE, features.DYNAMIC)
    ),
    *(
        Exclusion(
            features.SOURCES,
            other,
            "a teacher of some sources does not go with it",
            "leave sources out, or change it",
        )
        for other in (features.MODE, features.DYNAMIC, features.LINEAR)
    ),
    # Heads in another order than the ids.
    Exclusion(features.LAYOUT, features.SEVERAL, "vocabularies are laid out for a pair", _BY_IDS),
    *(
        Exclusion(kept, features.LAYOUT, why, _BY_IDS)
        for kept, why in (
            (features.REMOTE, "remote targets are in the order of the ids"),
            (features.CACHE, "cached targets are in the order of the ids"),
            (
                features.AVERAGE,
                "an average has the student's order of rows, and a layout has one for each side",
            ),
            (
                features.TRANSFORMERS,
                "a model of transformers has its head in the order of the ids",
            ),
            (features.LEARNED, "a learned projection is in the order of the ids"),
        )
    ),
    Exclusion(
        features.TASKS,
        features.LAYOUT,
        "tasks between steps read heads in the order of the ids",
        _ON_CHECKPOINTS,
    ),
    Exclusion(
        features.LAYOUT,
        features.NO_PROJECTION,
        "the objective has no projection to lay the vocabularies out by",
        "remove it, or take an objective with a projection, see docs/losses.md",
        "objectives",
    ),
    # The linear form, and what sees single terms.
    *(
        Exclusion(
            other,
            features.LINEAR,
            "the linear form does not go with it",
            "change it, or leave loss.linear out",
        )
        for other in (features.MODE, features.LEARNED)
    ),
    Exclusion(
        features.BY_GRADIENTS,
        features.LINEAR,
        "the linear form has one gradient of all terms, and the weighting asks for each",
        "take another weighting, or leave loss.linear out",
    ),
    Exclusion(
        features.STUDENT_CAP,
        features.LINEAR,
        "the linear form makes logits of the head alone",
        "leave loss.linear out",
    ),
    *(
        Exclusion(
            capped,
            features.READS_HEADS,
            "it makes logits of the heads alone",
            "take another objective, or a model without a cap",
        )
        for capped in (features.STUDENT_CAP, features.TEACHER_CAP)
    ),
    Exclusion(
        features.LINEAR,
        features.LATE_GATHER,
        "the linear form reads the head before overlap_param_gather has gathered it",
        "set one of them to false",
    ),
    Exclusion(
        features.LINEAR,
        features.NO_LINEAR_FORM,
        "the objective has no linear form, a sum over chunks or labels, each from rows of its own",
        "leave loss.linear out, or take another objective",
        "objectives",
    ),
    Exclusion(
        features.LEARNED,
        features.NO_LEARNER,
        "no objective learns a projection",
        "leave it out, or take projected_kl with proper numerics",
        "objectives",
    ),
    # Weights of the two terms.
    *(
        Exclusion(weight, weighting, _SETS_ITSELF, "leave the weight out")
        for weight, weighting in (
            (features.KD_WEIGHT, features.MATCHED),
            (features.KD_WEIGHT, features.BY_GRADIENTS),
            (features.CE_WEIGHT, features.BY_GRADIENTS),
        )
    ),
    *(
        Exclusion(
            weighting,
            features.NO_TEACHER,
            "the weighting needs distillation to weigh",
            "set loss.weighting to fixed or scheduled",
        )
        for weighting in (features.MATCHED, features.BY_GRADIENTS)
    ),
    *(
        Exclusion(
            features.NO_CROSS_ENTROPY,
            other,
            "no term of the loss has a weight, so that nothing would be learnt",
            "set loss.ce_weight above 0",
        )
        for other in (features.NO_TEACHER, features.NO_DISTILLATION, features.MATCHED)
    ),
    Exclusion(
        features.BY_GRADIENTS,
        features.RECOMPUTED,
        "gradients of single terms cannot pass activations that are computed again",
        "take another weighting, or keep activations",
    ),
    Exclusion(
        features.RECOMPUTED_WHOLE,
        features.LOWER_LAYERS,
        "states of layers that are computed again have no gradient",
        "compare the last layer, or keep activations: none, or selective",
        "objectives",
    ),
    Exclusion(
        features.BY_GRADIENTS,
        features.FROZEN_LAYERS,
        "the weighting compares gradients of the last layer's matrices, which do not learn",
        "take another weighting, or name layers, too",
    ),
    # Sequences cut over ranks.
    Exclusion(
        features.LINEAR,
        features.CONTEXT,
        "the linear form needs whole sequences, which context-parallel ranks have not",
        "set one of them back",
    ),
    Exclusion(
        features.WHOLE_SEQUENCES,
        features.CONTEXT,
        "the objective needs whole sequences so, which context-parallel ranks have not",
        "leave the option out, or set parallel.context_parallel_size to 1",
        "objectives",
    ),
    *(Exclusion(features.TASKS, cut, _NOT_CUT, _ON_CHECKPOINTS) for cut in _CUTS),
    # Experts.
    Exclusion(
        features.LORA,
        features.LATENT,
        "adapters are of other attention",
        "leave lora out",
    ),
    Exclusion(
        features.BY_GRADIENTS,
        features.STUDENT_EXPERTS,
        "losses of routers would be a part of each term's gradient",
        "take another weighting",
    ),
    Exclusion(features.TASKS, features.EXPERTS_OVER_REPLICAS, _IN_STEP, _ON_CHECKPOINTS),
    Exclusion(features.OWN_ROLLOUTS, features.EXPERTS_OVER_REPLICAS, _IN_STEP, _BY_SERVERS),
    # What the student samples.
    *(Exclusion(features.OWN_ROLLOUTS, cut, _NOT_CUT, _BY_SERVERS) for cut in _CUTS),
    Exclusion(
        features.OWN_ROLLOUTS,
        features.LAYOUT,
        "a student is sampled from with its head in the order of the ids",
        _BY_IDS,
    ),
    Exclusion(
        features.SERVED_ROLLOUTS,
        features.NO_START,
        "servers sample with the weights of a checkpoint, and there is none at first",
        "name one in initial_checkpoint, or leave the engine out",
    ),
    Exclusion(
        features.ROLLOUTS,
        features.CACHE,
        "a cache has no targets for what the student will write",
        "leave the cache out, so that the teacher reads each sample",
    ),
    Exclusion(
        features.ROLLOUTS,
        features.LINEAR_CROSS_ENTROPY,
        "the linear form has one set of labels, and cross-entropy is not for samples",
        "set loss.ce_weight to 0, or leave loss.linear out",
    ),
    Exclusion(
        features.ROLLOUTS,
        features.NO_TEACHER,
        "nothing is learnt from the student's own texts without a teacher",
        "add a teacher, or leave rollouts out",
    ),
    # The other loop.
    Exclusion(
        features.HELD_OUT,
        features.CACHE,
        "Megatron-LM measures the whole loss on held-out text, of which a cache has no targets",
        "leave one of them out",
        "megatron_lm",
    ),
    *(
        Exclusion(own, features.MEGATRON_LM, _OWN_LOOP, _IN_OWN_LOOP, "megatron_lm")
        for own in (
            features.LAYOUT,
            key_feature("loss.weighting", off="fixed"),
            features.CONTEXT,
            features.TASKS,
            features.OWN_RANKS,
            features.TRAINABLE,
            features.LORA,
            features.AVERAGE,
            features.ROLLOUTS,
            features.STUDENT_EXPERTS,
            features.TEACHER_EXPERTS,
        )
    ),
    *(
        Exclusion(shape, features.MEGATRON_LM, _NO_FLAG, _IN_OWN_LOOP, "megatron_lm")
        for shape in (
            key_feature("student.post_layernorms"),
            key_feature("student.scale_embeddings"),
            key_feature("student.gate_activation", off="silu"),
            key_feature("student.gate_limit", off=None),
            key_feature("student.gated_offset", off=0.0),
            key_feature("student.attention_sinks"),
            key_feature("student.attention_cap", off=None),
            features.STUDENT_CAP,
            features.LATENT,
            key_feature("student.linear_attention_freq", off=None),
            key_feature("student.attention_output_gate"),
            key_feature("student.softmax_scale", off=None),
            key_feature("student.local_rotary_base", off=None),
            key_feature("student.rotary_divisors", off=None),
            key_feature("student.unrotated_interval", off=None),
            key_feature("student.qk_layernorm_over", off="head"),
            key_feature("student.parallel_residual"),
            key_feature("student.add_bias_linear"),
            key_feature("student.residual_multiplier", off=1.0),
            key_feature("student.embedding_multiplier", off=1.0),
            key_feature("student.logits_scaling", off=1.0),
            features.FRACTION,
            features.WINDOW,
        )
    ),
)
