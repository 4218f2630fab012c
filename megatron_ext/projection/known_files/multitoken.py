"""The projection that ``minimal_projection_via_multitoken`` builds, from two tokenizers alone."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from megatron_ext.errors import ProjectionError
from megatron_ext.projection.building.builder import build_matrix
from megatron_ext.projection.building.options import ProjectionOptions
from megatron_ext.projection.history import with_step
from megatron_ext.projection.known_files.loose_entries import LooseEntries, sorted_entries
from megatron_ext.projection.known_files.tokenizer_pair import TokenizerPair
from megatron_ext.projection.projection_matrix import ProjectionMatrix


@dataclass(kw_only=True, frozen=True, slots=True)
class MultitokenOptions:
    """What the tool is told; names and defaults are those of its flags."""

    reverse_pass: bool = True
    """Also spell the teacher's tokens with the student's."""

    special_token_mapping: bool = True
    """Relate control tokens without a match by how alike their names are."""

    tokens_to_cut: int = 4
    """Most pieces of a spelling."""

    top_k: int = 32
    """Most entries of a row."""

    special_token_similarity_threshold: float = 0.3
    """Least similarity of two names."""

    special_token_top_k: int | None = None
    """Most entries of a control token; ``top_k`` where None."""

    def __post_init__(self) -> None:
        if self.special_token_top_k is not None and self.special_token_top_k < 1:
            raise ProjectionError(
                "no entry of a control token counts",
                got=self.special_token_top_k,
                expected="at least 1",
                where="special_token_top_k",
            )


def multitoken_projection(
    pair: TokenizerPair, options: MultitokenOptions, initial: LooseEntries | None = None
) -> ProjectionMatrix:
    """Exact rows, spellings of the others, and what an initial map adds to these.

    Args:
        pair: The tokenizers.
        options: What the flags say.
        initial: Entries whose weights are added to the shares of rows that are not exact.

    Raises:
        ProjectionError: A number that means nothing, or an initial map of other vocabularies.
    """
    similarity = options.special_token_similarity_threshold
    built = build_matrix(
        pair.student,
        pair.teacher,
        ProjectionOptions(
            top_k=options.top_k,
            pieces=options.tokens_to_cut,
            reverse_pass=options.reverse_pass,
            control_similarity=similarity if options.special_token_mapping else None,
        ),
    )
    if options.special_token_top_k is not None:
        built = _with_short_control_rows(built, pair, options.special_token_top_k)
    return built if initial is None else _added(built, initial, options.top_k)


def _with_short_control_rows(
    built: ProjectionMatrix, pair: TokenizerPair, most: int
) -> ProjectionMatrix:
    entries = LooseEntries.of(built).merged()
    is_kept = pair.is_ordinary[entries.rows] | (entries.slots < most)
    return entries.kept(is_kept).projection(built.shape, is_exact_row=built.is_exact_row)


def _added(built: ProjectionMatrix, initial: LooseEntries, top_k: int) -> ProjectionMatrix:
    entries = LooseEntries.of(built)
    for ids, size, role in zip(
        (initial.rows, initial.columns), built.shape, ("student", "teacher"), strict=True
    ):
        if ids.max(initial=-1) >= size:
            raise ProjectionError(
                f"the initial map is of a larger {role} vocabulary",
                got=f"id {ids.max()}",
                expected=f"0 to {size - 1}",
                fix="build one from the two tokenizers: megatron-ext projection build",
            )
    initial = initial.kept(~built.is_exact_row[initial.rows])
    together = sorted_entries(
        np.concatenate((entries.rows, initial.rows)),
        np.concatenate((entries.columns, initial.columns)),
        np.concatenate((entries.weights, initial.weights)),
        like=replace(entries, slot_count=0),
    ).merged()
    return together.kept(together.slots < top_k).projection(
        built.shape,
        is_exact_row=built.is_exact_row,
        metadata=with_step(built.metadata, "initial_projection"),
    )
