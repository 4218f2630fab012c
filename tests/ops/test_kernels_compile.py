"""Every kernel compiles to machine code for a Hopper GPU, which interpreting does not show."""

from typing import get_args

import pytest

from megatron_ext.ops.binary_divergence import Difference
from tests.ops.compile_kernel import arguments, compiled_variants, compiles
from tests.ops.projected_kl_variants import (
    learned_variants,
    number_variants,
    other_variants,
    single_variants,
    summed_variants,
    sweep_variants,
    variant,
)
from tests.ops.wide_load_variants import wide_variants

LOGITS = ("*bf16", "*fp32")
TEMPERED = {"HAS_TEMPERATURE": True, "BLOCK": 4096}
LABELS = arguments("label: *i64; label_weight plain_peak plain_log_sum: *fp32")
"""Of a kernel that writes the cross-entropy's part of a gradient, too."""
NO_LABELS = dict.fromkeys(LABELS)


def test_softmax_statistics():
    types = arguments(
        "members read: *i1; peak total: *fp32; column: *i64; "
        "row_stride width held_width rows: i32; temperature: fp32"
    )
    flags = {"HAS_MEMBERS": True, "HAS_READ": True, **TEMPERED}
    compiles(
        "softmax_kernels",
        [("row_statistics_kernel", {"logits_ptr": kind, **types}, flags) for kind in LOGITS],
    )


def test_unit_gradient():
    types = arguments(
        "arrives own: *fp32; slot: *i64; common: fp32; "
        "arrives_stride own_stride chunks row_stride width: i32"
    )
    alone = {"own_ptr": None, "slot_ptr": None}
    compiles(
        "triton_math",
        [
            ("scale_to_kernel", {**types, "gradient_ptr": kind}, {"BLOCK": 8192, **given})
            for kind in LOGITS
            for given in ({}, alone)
        ],
        # A row that gets the gradient it was written for is neither read nor written.
        containing=r"div\.rn\.(ftz\.)?f32",
    )


def test_sums():
    chunks = arguments(
        "values sums kept: *fp32; used: *i1; class: *i8; offsets: *i32; counts: *i64; chunks: i32"
    )
    labels = arguments("row_loss sums: *fp32; column label count: *i64; rows: i32")
    rows = arguments(
        "student_told teacher_told: *fp32; student_label student_chunk teacher_chunk: *i64; "
        "flags: *i32; student_rows teacher_rows: i32"
    )
    names = {"NO_LABEL": -100, "NO_CHUNK": -1, "BLOCK": 4096}
    of_chunks = {"HAS_USED": True, "HAS_ROWS": True, "COLUMNS": 4, "CLASSES": 4, "BLOCK": 1024}
    of_rows = of_chunks | {"HAS_ROWS": False, "CLASSES": 0, "class_ptr": None, "offsets_ptr": None}
    no_labels = names | {"teacher_label_ptr": None}
    compiles(
        "sum_kernels",
        [
            ("chunk_sums_kernel", chunks, of_chunks),
            ("chunk_sums_kernel", chunks, of_rows),
            ("label_sums_kernel", labels, {"NO_LABEL": -100, "BLOCK": 4096}),
            ("bad_rows_kernel", rows, no_labels),
            ("bad_rows_kernel", {**rows, "teacher_told_ptr": "*i1"}, no_labels),
        ],
    )


def test_likelihoods():
    tokens = arguments(
        "token_peak token_sum whole_peak whole_sum members_peak members_sum log_prob log_mass: "
        "*fp32; token: *i64; vocab_size rows: i32"
    )
    sides = "; ".join(
        f"{side}_log_prob {side}_log_mass: *fp32; {side}_label {side}_spans {side}_behind: *i64; "
        f"{side}_order {side}_offsets: *i32; {side}_length: i32"
        for side in ("student", "teacher")
    )
    chunks = arguments(f"{sides}; used flags: *i1; numbers: *fp32; behind: *i64; chunks: i32")
    next_rows = dict.fromkeys(("student_behind_ptr", "teacher_behind_ptr", "used_ptr"))
    gradients = arguments(
        "on_chunk on_boundary on_token on_mass: *fp32; chunk behind: *i64; rows chunks: i32"
    )
    events = arguments(
        "student teacher numbers: *fp32; compared kept: *i1; chunks: i32; "
        "temperature coin alpha: fp32"
    )
    block = {"BLOCK": 128}
    variants = [
        ("token_likelihoods_kernel", tokens, {"HAS_MEMBERS": True, "BLOCK": 1024}),
        ("chunk_likelihoods_kernel", chunks, {**next_rows, **block}),
        ("chunk_likelihoods_kernel", chunks, block),
        ("chunk_likelihood_gradients_kernel", gradients, block),
    ]
    variants += [
        ("compare_events_kernel", events, {"DIFFERENCE": name, **block})
        for name in get_args(Difference)
    ]
    signals = arguments(
        "student teacher sampled numbers: *fp32; usable kept: *i1; order offsets: *i32; "
        "chunks: i32; most_signal most_ratio most_in_value most_log_ratio: fp32"
    )
    variants += [
        ("sampled_signals_kernel", signals, block),
        ("sampled_signals_kernel", signals, {**block, "sampled_ptr": None}),
    ]
    compiles("likelihood_kernels", variants)


def test_selected_tokens():
    rows = arguments(
        "logits: *bf16; token label asked column place: *i64; picked: *fp32; of_row bits: *i32; "
        "row_stride token_stride start width vocab_size words tokens: i32"
    )
    log_probs = arguments(
        "picked peak log_sum log_prob whole loss: *fp32; asked label place: *i64; "
        "vocab_size rows entries: i32"
    )
    gradients = arguments(
        "log_prob on peak log_sum weight value rests: *fp32; label place row: *i64; of_row: *i32; "
        "weight: fp32; rows entries: i32"
    )
    keys = arguments(
        "logits: *bf16; value: *fp32; column: *i32; keys: *i64; "
        "first_row row_stride start candidates: i32"
    )
    columns = arguments("keys column: *i64; keys columns: i32")
    tokens = arguments("token partner student_spans teacher_spans out: *i64; tokens: i32")
    compared = arguments(
        "student teacher values slope: *fp32; student_spans teacher_spans: *i64; agrees: *i1; "
        "chunks tokens: i32; mixture: fp32"
    )
    slopes = arguments("slope arrives out: *fp32; student_spans: *i64; entries: i32")
    block, labels = {"BLOCK": 64}, {"HAS_LABELS": True, "BLOCK": 64}
    unlabelled = {"HAS_LABELS": False, "BLOCK": 64, "label_ptr": None, "place_ptr": None}
    variants = [
        ("ask_tokens_kernel", rows, labels),
        ("ask_tokens_kernel", rows, unlabelled),
        ("token_log_probs_kernel", log_probs, labels),
        ("token_log_probs_kernel", log_probs, {**unlabelled, "loss_ptr": None}),
        ("token_gradients_kernel", gradients, labels),
        ("token_gradients_kernel", gradients, {**labels, "weight_ptr": None}),
        ("token_gradients_kernel", gradients, {**unlabelled, "weight_ptr": None}),
        ("tokens_of_chunks_kernel", tokens, block),
        ("tokens_of_chunks_kernel", tokens, {**block, "partner_ptr": None}),
        ("slopes_of_rows_kernel", slopes, block),
    ]
    variants += [
        (
            "compare_selected_kernel",
            compared,
            {"HAS_LABEL": has, "RENORMALISES": not has, "DIRECTION": direction, **block},
        )
        for has, direction in ((True, "forward"), (False, "reverse"), (True, "jensen_shannon"))
    ]
    compiles("selected_tokens.triton_kernels", variants)
    of_keys = [("candidate_keys_kernel", keys, block), ("columns_of_keys_kernel", columns, block)]
    compiles("sorted_l1.selection_kernel", of_keys)


def test_labels():
    rows = arguments(
        "label column: *i64; weight label_weight peak total: *fp32; read: *i1; "
        "row_stride start width rows: i32; temperature weight: fp32"
    )
    losses = arguments(
        "peak log_sum whole_peak whole_log_sum loss: *fp32; label: *i64; read: *i1; "
        "vocab_size rows: i32"
    )
    block = {"BLOCK": 1024}
    looked_up = [("label_rows_kernel", {**rows, "logits_ptr": kind}, block) for kind in LOGITS]
    common = ("label_rows_kernel", {**rows, "logits_ptr": "*bf16"}, {**block, "weight_ptr": None})
    compiles("sum_kernels", [*looked_up, common, ("label_losses_kernel", losses, block)])


def _mean_rows(more):
    """Types of what a kernel needs of a model's rows, and of ``more``."""
    return arguments("order offsets: *i32; peak log_sum: *fp32; temperature: fp32; " + more)


def test_chunk_distributions():
    types = _mean_rows("first_chunk row_stride width valid_width: i32; out: *fp32")
    compiles(
        "chunk_kernels",
        [("chunk_means_kernel", {"logits_ptr": kind, **types}, TEMPERED) for kind in LOGITS],
    )


def test_sorted_l1():
    candidates = arguments("columns: *i32; signs: *i8; centre: *fp32")
    flags = {"HAS_TEMPERATURE": True, "BLOCK": 1024}
    selections, variants = [], []
    for kind in LOGITS:
        select = _mean_rows(
            "first_chunk row_stride first_column width padded_width places capacity: i32; "
            f"excluded: *i1; values rest: *fp32; columns: *i32; logits: {kind}"
        )
        keep = _mean_rows(f"first_chunk row_stride capacity: i32; logits kept: {kind}")
        spread = _mean_rows(
            "first_chunk row_stride gradient_stride width valid_width: i32; "
            f"centre scale: *fp32; logits gradient: {kind}"
        )
        write = _mean_rows(
            "first_chunk gradient_stride capacity: i32; weight: fp32; base scale: *fp32; "
            f"kept gradient: {kind}"
        )
        every = {"HAS_EXCLUDED": True, "BY_LOGIT": False}
        selections.append(("select_kernel", select, TEMPERED | every))
        by_logit = {"HAS_EXCLUDED": True, "BY_LOGIT": True, "HAS_TEMPERATURE": False}
        no_sums = dict.fromkeys(("peak_ptr", "log_sum_ptr"))
        given = {name: kind for name, kind in select.items() if name not in no_sums}
        selections.append(("select_kernel", given, TEMPERED | by_logit | no_sums))
        variants += [
            ("keep_chosen_kernel", keep | candidates, flags),
            ("spread_kernel", spread | LABELS, TEMPERED),
            ("write_chosen_kernel", write | candidates | LABELS, flags | {"HAS_BASE": True}),
        ]
    plain = flags | NO_LABELS | {"HAS_TEMPERATURE": False}
    variants.append(("spread_kernel", spread, plain))
    variants.append(
        ("write_chosen_kernel", write | candidates, plain | {"base_ptr": None, "HAS_BASE": False})
    )
    compiles("sorted_l1.selection_kernel", selections)
    compiles("sorted_l1.triton_kernels", variants)
    places = arguments(
        "student teacher merged rest value left_out: *fp32; origin: *i64; signs: *i8; "
        "places kept student_runs student_length teacher_runs teacher_length: i32; "
        "first_run own_runs own_count: i32"
    )
    steps = {"STUDENT_STEPS": 12, "TEACHER_STEPS": 12, "BLOCK": 1024}
    compiles("sorted_l1.triton_kernels", [("compare_places_kernel", places, steps)])


def test_token_likelihood():
    types = arguments(
        "vectors: *fp32; column: *i64; temperature: fp32; "
        "logits_stride gradient_stride width padded_width rows: i32"
    )
    flags = {"HAS_MEMBERS": True, **TEMPERED}
    pairs = [arguments(f"logits gradient: {kind}") | types for kind in LOGITS]
    with_set = arguments("members written: *i1")
    variants = [("token_gradient_kernel", pair | with_set, flags) for pair in pairs]
    alone = {"members_ptr": None, "written_ptr": None, "HAS_MEMBERS": False}
    plain = alone | {"HAS_TEMPERATURE": False, "BLOCK": 4096}
    variants.append(("token_gradient_kernel", pairs[-1], plain))
    compiles("chunk_kernels", variants)


def test_vocab_kl():
    numbers = "student_stride teacher_stride width held_width rows: i32; temperature: fp32; "
    statistics = arguments(numbers + "read: *i1; peak total: *fp32; column: *i64")
    sweep = arguments(
        numbers + "vectors sums: *fp32; column: *i64; gradient_stride padded_width: i32; "
        "mixture: fp32"
    )
    both = {"HAS_READ": True, "HAS_PLAIN": True, **TEMPERED}
    passes = [
        ("forward", True, True),
        ("reverse", True, False),
        ("reverse", False, True),
        ("jensen_shannon", False, True),
    ]
    variants = []
    for kind in LOGITS:
        pair = arguments(f"student teacher: {kind}")
        variants.append(("pair_statistics_kernel", pair | statistics, both))
        for direction, sums, gradient in passes:
            parts = {"DIRECTION": direction, "HAS_SUMS": sums, "HAS_GRADIENT": gradient}
            given = {**pair, "gradient_ptr": kind, **sweep}
            variants.append(("vocab_kl_kernel", given, {**parts, "HAS_LABELS": True, **TEMPERED}))
    compiles("vocab_kl.triton_kernels", variants)


def test_partition_kl():
    split = arguments(
        "set bits: *i32; sums: *fp32; column: *i64; masked: *i1; temperature: fp32; "
        "row_stride width rows padded_width words leading members_end: i32"
    )
    pair = arguments(
        "partner: *i32; student_row teacher_row: *i64; norms: *fp32; temperature: fp32; "
        "row_stride teacher_stride arrived_stride width chunks: i32"
    )
    tokens = arguments("label: *i64; tokens: *fp32; gradient_stride padded_width rows: i32")
    single = {**pair, **tokens, **arguments("factors sums: *fp32; mixture: fp32")}
    lost = {**pair, **arguments("is_masked: *i1; lost: *fp32")}
    others = {**tokens, **arguments("row_stride width: i32; set: *i32; rests: *fp32")}
    entries = arguments("row column: *i64; value: *fp32; count gradient_stride: i32")
    block = {"BLOCK": 4096}
    every = {"HAS_UNSCALED": True, **TEMPERED}
    few = {"HAS_TEMPERATURE": False, "HAS_UNSCALED": False, **block}
    alone = {"HAS_TEMPERATURE": False, "HAS_ARRIVED": False, **block}
    sent = {"HAS_ARRIVED": True, **TEMPERED}
    variants = []
    for kind in LOGITS:
        logits, written = {"logits_ptr": kind}, {"gradient_ptr": kind}
        both = logits | {"teacher_ptr": kind, "arrived_ptr": kind}
        variants += [
            ("split_statistics_kernel", logits | split | arguments("top: *i64"), every),
            ("split_statistics_kernel", logits | split | arguments("top: *i64"), few),
            ("split_statistics_kernel", logits | split, few | {"top_ptr": None}),
            ("masked_mass_kernel", both | lost, sent),
            ("other_rows_kernel", logits | written | others, {"HAS_LABELS": True, **block}),
            ("store_entries_kernel", written | entries, {"BLOCK": 256}),
        ]
        for direction, sums, gradient, labels, flags in (
            ("forward", True, True, True, alone),
            ("reverse", True, False, False, sent),
            ("reverse", False, True, True, sent),
            ("jensen_shannon", False, True, False, alone),
        ):
            passes = {"DIRECTION": direction, "STORES_SUMS": sums, "STORES_GRADIENT": gradient}
            flags = {**passes, "HAS_LABELS": labels, **flags}
            variants.append(("single_rows_kernel", both | written | single, flags))
    compiles("partition_kl.triton_kernels", variants)


def test_partition_kl_numbers():
    sums = " ".join(
        f"{side}_{part}"
        for side in ("student", "teacher")
        for part in ("members_peak", "members_sum", "others_peak", "others_sum")
    )
    norms = arguments(
        f"{sums} norms: *fp32; student_row teacher_row student_column teacher_column column: *i64; "
        "chunks: i32; temperature: fp32"
    )
    agreement = arguments(
        "norms: *fp32; student_column teacher_column token: *i64; tokens chunks: i32; out: *i1"
    )
    rest = arguments("norms sum scale value factors: *fp32; count: i32; temperature mixture: fp32")
    whole = arguments(
        "members_peak members_sum others_peak others_sum weight numbers: *fp32; rows: i32"
    )
    block = {"BLOCK": 256}
    rests = [
        ("rest_terms_kernel", rest, {**block, "DIRECTION": direction, "IS_LOST": is_lost})
        for direction, is_lost in (("forward", True), ("reverse", False), ("jensen_shannon", False))
    ]
    columns = " ".join(
        f"{part}{column}"
        for part in ("single", "chain")
        for column in ("", "_rest", "_teacher_rest")
    )
    by_chunk = arguments(
        f"{columns} values factor: *fp32; single_agreement chain_agreement counted usable: *i1; "
        "place: *i32; factor: fp32; singles chunks: i32"
    )
    unscaled = {"scale_ptr": None, "DIRECTION": "forward", "IS_LOST": True}
    rests.append(("rest_terms_kernel", rest, block | unscaled))
    compiles(
        "partition_kl.number_kernels",
        [
            ("single_norms_kernel", norms, block),
            ("single_agreement_kernel", agreement, block),
            ("whole_rows_kernel", whole, block),
            ("values_by_chunk_kernel", by_chunk, block),
            ("values_by_chunk_kernel", by_chunk, {**block, "factor_ptr": None}),
            *rests,
        ],
    )


def test_partition_kl_split():
    begin = arguments("read: *i1; word of_row bits: *i32; base rows words: i32")
    entries = arguments(
        "step_row last_row step_label completion chain single_row row column local place at_row: "
        "*i64; of_row bits: *i32; peak total: *fp32; "
        "row_stride start width steps ends completions singles words: i32"
    )
    logits = arguments(
        "peak log_sum others_peak others_sum chosen rest rests: *fp32; row: *i64; edge: *i32; "
        "steps rows: i32"
    )
    gradients = arguments(
        "chosen_gradient rest_gradient peak log_sum tokens rests value: *fp32; "
        "row at_row column label: *i64; entries ends rows: i32"
    )
    block = {"BLOCK": 256}
    no_labels = {"label_ptr": None, "tokens_ptr": None}
    looked_up = [
        ("split_entries_kernel", {**entries, "logits_ptr": kind}, block) for kind in LOGITS
    ]
    compiles(
        "partition_kl.split_kernels",
        [
            *looked_up,
            ("split_begin_kernel", begin, block),
            ("split_begin_kernel", begin, {**block, "read_ptr": None}),
            ("chosen_logits_kernel", logits, {"BLOCK": 128}),
            ("chosen_logits_kernel", logits, {"BLOCK": 128, "rests_ptr": None}),
            ("chain_gradients_kernel", gradients, block),
            ("chain_gradients_kernel", gradients, block | no_labels),
        ],
    )


def test_chains():
    types = arguments(
        "student_chosen student_others teacher_chosen teacher_others scale divergence "
        "student_rest teacher_rest chosen_gradient others_gradient: *fp32; "
        "student_step teacher_step completion: *i32; counted agreement: *i1; "
        "student_steps teacher_steps: i32; temperature mixture: fp32"
    )
    variants = [
        (
            "compare_chains_kernel",
            types,
            {"DIRECTION": direction, "HAS_MASSES": known, "HAS_GRADIENT": True, "BLOCK": 128},
        )
        for direction, known in (("jensen_shannon", False), ("forward", True), ("reverse", False))
    ]
    compiles("partition_kl.chain_kernels", variants)


def test_prefix_masses():
    types = arguments(
        "row: *i64; peak log_sum: *fp32; column pointers slot: *i32; out: *fp32; "
        "row_stride out_stride slots: i32"
    )
    rows = [{"logits_ptr": kind, **types} for kind in LOGITS]
    variants = [("column_masses_kernel", row, {"BLOCK": 512}) for row in rows]
    compiles("prefix_masses.triton_kernels", variants)


def test_matched_divergence():
    shared = "; ".join(
        f"{side}_order {side}_offsets: *i32; {side}_peak {side}_log_sum {side}_used: *fp32"
        for side in ("student", "teacher")
    )
    shared += (
        "; pairs: *i32; temperature mixture: fp32; "
        "first_chunk aligned paired width: i32; "
        "student_stride teacher_stride moved_stride: i32; "
    )
    compared = arguments(
        shared + "value row_slope best: *fp32; column: *i64; column_start padded_width: i32"
    )
    written = arguments(shared + "base shift centre scale: *fp32; gradient_stride valid_width: i32")
    variants = []
    for kind, direction, is_moved in (
        ("*bf16", "reverse", True),
        ("*fp32", "forward", False),
        ("*bf16", "jensen_shannon", False),
    ):
        flags = {"DIRECTION": direction, "MOVED": is_moved, **TEMPERED}
        both = arguments(f"student teacher: {kind}")
        if is_moved:
            both["moved_ptr"] = "*fp32"
        else:
            flags["moved_ptr"] = None
        variants.append(("compare_kernel", compared | both, flags))
        labels = NO_LABELS if direction == "reverse" else {}
        every = written | both | {"gradient_ptr": kind} | ({} if labels else LABELS)
        variants.append(("gradient_kernel", every, flags | labels))
    compiles("matched_divergence.triton_kernels", variants)


def test_matched_divergence_numbers():
    sides = "; ".join(
        f"{side}_order {side}_chunk: *i32; {side}_peak {side}_log_sum {side}_members_peak "
        f"{side}_members_sum {side}_used {side}_mass: *fp32"
        for side in ("student", "teacher")
    )
    masses = arguments(
        sides + "; scale row_mass value slope factor: *fp32; chunks: i32; temperature mixture: fp32"
    )
    centre = arguments(
        "chunk: *i64; row_slope chosen mass slope centre: *fp32; rows: i32; weight: fp32"
    )
    block = {"BLOCK": 128}
    variants = [
        ("chunk_masses_kernel", masses, {**block, "DIRECTION": direction, "WITH_REST": with_rest})
        for direction, with_rest in (
            ("forward", True),
            ("jensen_shannon", True),
            ("reverse", False),
        )
    ]
    alone = {"scale_ptr": None, "DIRECTION": "reverse", "WITH_REST": True}
    variants.append(("chunk_masses_kernel", masses, block | alone))
    variants.append(("rest_centre_kernel", centre, block))
    compiles("matched_divergence.number_kernels", variants)


@pytest.mark.parametrize(
    ("module", "variants"),
    [
        ("triton_kernels", other_variants),
        ("triton_kernels", sweep_variants),
        ("triton_kernels", learned_variants),
        ("summed_kernels", summed_variants),
        ("number_kernels", number_variants),
        ("single_kernel", single_variants),
    ],
)
def test_projected_kl(module, variants):
    compiles(f"projected_kl.{module}", variants())


def test_the_labels_logit_is_read_by_all_warps_before_one_writes_the_gradient_over_it():
    flags = {"IS_ALIGNED": False, "HAS_GRADIENT": True, "HAS_DIAGNOSTICS": False}
    sizes = {"HAS_LABELS": True, "HAS_TEMPERATURE": False, "BLOCK": 512, "PARTS": 16}
    compiles(
        "projected_kl.single_kernel",
        [variant("single_kernel", "*bf16", **flags, **sizes)],
        # No store before the first barrier.
        containing=r"\A(?:(?!st\.global)[\s\S])*bar\.sync",
    )


@pytest.mark.parametrize(("module", "variant"), wide_variants())
def test_rows_are_read_16_bytes_at_once(module, variant):
    # To registers, or ahead of time to shared memory, which .cg does by 16 bytes alone.
    compiles(module, [variant], containing=r"ld\.global\.v4|cp\.async\.cg")


@pytest.mark.parametrize(
    ("module", "kernels"),
    [
        ("triton_math", 1),
        ("softmax_kernels", 1),
        ("sum_kernels", 4),
        ("likelihood_kernels", 5),
        ("selected_tokens.triton_kernels", 3),
        ("chunk_kernels", 2),
        ("vocab_kl.triton_kernels", 2),
        ("partition_kl.triton_kernels", 5),
        ("partition_kl.number_kernels", 5),
        ("partition_kl.split_kernels", 3),
        ("sorted_l1.selection_kernel", 1),
        ("sorted_l1.triton_kernels", 3),
        ("matched_divergence.triton_kernels", 2),
        ("matched_divergence.number_kernels", 2),
        ("projected_kl.triton_kernels", 3),
        ("projected_kl.number_kernels", 3),
        ("projected_kl.summed_kernels", 4),
        ("projected_kl.single_kernel", 1),
    ],
)
def test_microbatches_of_other_sizes_compile_nothing_again(module, kernels):
    # Triton specialises numbers that are 1 or divide by 16, unless it is told not to.
    variants = compiled_variants(module, [1, 16, 17, 8192])
    assert variants == dict.fromkeys(variants, 1)
    assert len(variants) == kernels
