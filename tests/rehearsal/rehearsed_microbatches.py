"""A microbatch's loss beside cross-entropy on the pretended device: how often something is launched
on it, by torch or as a kernel."""

from collections.abc import Callable
from dataclasses import replace
from typing import Final

import torch

from megatron_ext.losses import LOSS_REGISTRY, DistillationInputs, Objective
from megatron_ext.losses.linear import LinearDistillation, no_logits
from megatron_ext.losses.plan import LossPart, LossPlan
from tests.losses.microbatch import known_ahead
from tests.losses.objective_cases import CASES, ObjectiveCase, table_of, with_hidden_states
from tests.rehearsal.pretended_cuda import EVENTS
from tests.rehearsal.rehearsed_losses import objective_on, on_device

SCALES: Final = {"kd": 0.3, "ce": 0.5}
_WHOLE, _CUT = 100, 16
"""Rows of a tile that holds the microbatch, and of one that holds a part of it."""


def rehearse_microbatch(name: str) -> dict[str, int]:
    """Launches of a microbatch of logits, forward, backward and check of bad numbers, and of a tile
    of the linear form, its products among them; each of a second evaluation."""
    case = CASES[name]
    inputs = case.build(case.batch(), (3, 1))
    logits = _launches(_by_logits(case, on_device(inputs)))
    if case.objective().why_no_linear_form is not None:
        return {"logits": logits}
    hidden = with_hidden_states(case.batch(), (3, 1))
    teacher = hidden.teacher if "hidden" in case.kinds else inputs.teacher
    states = {"student_hidden": hidden.student_hidden, "teacher": teacher}
    inputs = replace(inputs, **states, student_head_weight=hidden.student_head_weight)
    objectives = {"kd": objective_on(case, "cuda"), "ce": LOSS_REGISTRY["next_token"]()}
    moved = on_device(inputs)
    runs = [_by_tiles(objectives, inputs, moved, rows) for rows in (_WHOLE, _CUT)]
    (one, by_whole), (several, by_cut) = runs
    whole, cut = _launches(by_whole), _again(by_cut)
    return {"logits": logits, "tile": (cut - whole) // (several - one)}


def _launches(run: Callable[[], None]) -> int:
    run()
    return _again(run)


def kernels_by_torch(name: str) -> list[str]:
    """Kernels that a microbatch of logits launches whose objectives are asked for torch alone."""
    case = CASES[name]
    built = case.build(case.batch(), (3, 1))
    if built.alignment is not None:
        of_text = torch.zeros(built.alignment.chunk_count, dtype=torch.int64)
        built = replace(built, chunk_text_class=of_text, chunk_script=of_text)
    inputs = on_device(built)
    EVENTS.clear()
    _by_logits(case, inputs, implementation="torch")()
    return EVENTS.lines("kernel")


def _again(run: Callable[[], None]) -> int:
    EVENTS.clear()
    run()
    return EVENTS.number("launch", "kernel")


def _by_logits(
    case: ObjectiveCase, inputs: DistillationInputs, **options: str
) -> Callable[[], None]:
    objectives = {"ce": LOSS_REGISTRY["next_token"](), "kd": objective_on(case, "cuda")}
    objectives = {name: replace(each, **options) for name, each in objectives.items()}

    def run() -> None:
        # A plan may write its gradient over them, but not into a leaf.
        its = replace(inputs, student_logits=inputs.student_logits.detach().requires_grad_())
        parts = {
            name: LossPart(objective=objective, inputs=its, term=name, count_name=name)
            for name, objective in objectives.items()
        }
        loss = LossPlan(parts=parts, term_weights=SCALES).loss(dict.fromkeys(SCALES, 1))
        loss.total.backward()
        if objectives["kd"].tells_bad(its):
            told = loss.outputs["kd"].bad
            assert told is not None
            told()

    return run


def _by_tiles(
    objectives: dict[str, Objective],
    inputs: DistillationInputs,
    moved: DistillationInputs,
    rows: int,
) -> tuple[int, Callable[[], None]]:
    """Number of tiles, and the evaluation."""
    form = LinearDistillation(objectives=objectives, tile_rows=rows)
    tiles = form.tiles(known_ahead(inputs), table_of(inputs)).to("cuda")

    def run() -> None:
        assert moved.student_hidden is not None
        assert moved.student_head_weight is not None
        hidden = moved.student_hidden.detach().requires_grad_()
        head = moved.student_head_weight.detach().requires_grad_()
        logits = no_logits(hidden, moved.student_shard)
        its = replace(moved, student_logits=logits, student_hidden=hidden, student_head_weight=head)
        form(its, tiles, SCALES).total.backward()

    return len(tiles.plan.tiles), run
