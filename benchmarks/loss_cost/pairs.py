"""A student's vocabulary, a teacher's, their projection and a text in both; as files or made up.

Vs Vt vocabularies, T tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import numpy as np
from numpy.typing import NDArray

from megatron_ext.constants import NO_CHUNK
from megatron_ext.projection import SparseProjection

INPUTS: Final = Path(__file__).parents[1] / "inputs"
"""Where ``benchmarks/make_inputs.py`` writes; not under version control."""

Tokens = Sequence[bytes | None]
Ids = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Structure:
    """Numbers of a real pair, from which one of the same shape is made up where it is not there."""

    common: int
    two_piece: int
    """Student tokens that are two teacher tokens; all others left are three."""


SIZES: Final = {
    "Llama 3.2 x Qwen 3": (128_256, 151_669),
    "Llama 3.2 x Gemma 3": (128_256, 262_145),
}
STRUCTURES: Final = {
    "Llama 3.2 x Qwen 3": Structure(common=109_567, two_piece=12_440),
    "Llama 3.2 x Gemma 3": Structure(common=86_436, two_piece=37_325),
}
CHUNK_PATTERN: Final = ((1, 1),) * 6 + ((2, 1), (1, 2), (1, 3), (2, 2)) + ((1, 1),) * 50
"""Student and teacher tokens of each chunk in a text that is made up: 93 % are one to one."""


@dataclass(frozen=True, kw_only=True)
class Pair:
    """What a benchmark needs of two tokenizers and a text."""

    name: str

    source: str
    """"published" or "synthetic"."""

    projection: SparseProjection
    """[Vs, Vt]"""

    student_tokens: Tokens
    """[Vs] bytes by id, None for a control token."""

    teacher_tokens: Tokens

    student_ids: Ids
    """[Ts] the text."""

    teacher_ids: Ids

    student_chunk: Ids
    """[Ts] chunk of each token, ``NO_CHUNK`` for none; ascending."""

    teacher_chunk: Ids

    def of_rows(self, rows: int) -> Pair:
        """The first ``rows`` student tokens, repeating the text if need be, and their teacher's.

        A chunk that would be cut is left out on both sides.
        """
        repeats = -(-rows // len(self.student_ids))
        chunks = 1 + int(self.student_chunk.max())
        sides = [
            _repeated(ids, chunk, chunks, repeats)
            for ids, chunk in (
                (self.student_ids, self.student_chunk),
                (self.teacher_ids, self.teacher_chunk),
            )
        ]
        student_ids, student_chunk = sides[0]
        teacher_ids, teacher_chunk = sides[1]
        cut = student_chunk[rows:]
        first_cut = int(cut[cut != NO_CHUNK].min(initial=chunks * repeats))
        student_chunk = np.where(student_chunk < first_cut, student_chunk, NO_CHUNK)[:rows]
        stop = 1 + int(np.flatnonzero((teacher_chunk < first_cut) & (teacher_chunk >= 0)).max())
        return replace(
            self,
            student_ids=student_ids[:rows],
            student_chunk=student_chunk,
            teacher_ids=teacher_ids[:stop],
            teacher_chunk=np.where(teacher_chunk < first_cut, teacher_chunk, NO_CHUNK)[:stop],
        )

    def excerpt(self, rows: int) -> Pair:
        """``rows`` student tokens with as many teacher tokens to each as the whole text has."""
        ratio = len(self.teacher_ids) / len(self.student_ids)
        count = 1 + int(self.student_chunk.max())
        starts = [np.searchsorted(chunk, np.arange(count)) for chunk in self._ascending()]
        wanted = starts[0] + rows
        stop = np.searchsorted(starts[0], wanted)
        fits = np.flatnonzero(stop < count)
        fits = fits[starts[0][stop[fits]] == wanted[fits]]
        lengths = starts[1][stop[fits]] - starts[1][fits]
        first = int(fits[np.abs(lengths - ratio * rows).argmin()])
        begin = [int(side[first]) for side in starts]
        end = [int(side[stop[first]]) for side in starts]
        return replace(
            self,
            student_ids=self.student_ids[begin[0] : end[0]],
            teacher_ids=self.teacher_ids[begin[1] : end[1]],
            student_chunk=_from(self.student_chunk[begin[0] : end[0]], first),
            teacher_chunk=_from(self.teacher_chunk[begin[1] : end[1]], first),
        )

    def _ascending(self) -> tuple[Ids, Ids]:
        """Chunks of the tokens, those of no chunk counted to the chunk before."""
        return (
            np.maximum.accumulate(self.student_chunk),
            np.maximum.accumulate(self.teacher_chunk),
        )

    def save(self, folder: Path) -> None:
        """Two files: ``<name>.safetensors``, the projection, and ``<name>.npz``."""
        folder.mkdir(parents=True, exist_ok=True)
        self.projection.save(folder / f"{file_stem(self.name)}.safetensors")
        arrays: dict[str, NDArray[np.generic]] = {}
        for side, tokens in (("student", self.student_tokens), ("teacher", self.teacher_tokens)):
            arrays[f"{side}_bytes"] = np.frombuffer(b"".join(t or b"" for t in tokens), np.uint8)
            arrays[f"{side}_lengths"] = np.array(
                [-1 if token is None else len(token) for token in tokens], dtype=np.int32
            )
        for name in ("student_ids", "teacher_ids", "student_chunk", "teacher_chunk"):
            arrays[name] = getattr(self, name).astype(np.int32)
        np.savez_compressed(folder / f"{file_stem(self.name)}.npz", **arrays)


def load_pair(name: str, folder: Path = INPUTS) -> Pair:
    """The pair of this name from its files, or one of the same structure where there are none."""
    path = folder / f"{file_stem(name)}.npz"
    if not path.exists():
        return synthetic_pair(name, SIZES[name], STRUCTURES[name])
    with np.load(path) as arrays:
        tokens = {
            side: _split(arrays[f"{side}_bytes"].tobytes(), arrays[f"{side}_lengths"].tolist())
            for side in ("student", "teacher")
        }
        ids = {
            name: arrays[name].astype(np.int64)
            for name in ("student_ids", "teacher_ids", "student_chunk", "teacher_chunk")
        }
    return Pair(
        name=name,
        source="published",
        projection=SparseProjection.load(path.with_suffix(".safetensors")),
        student_tokens=tokens["student"],
        teacher_tokens=tokens["teacher"],
        **ids,
    )


def synthetic_pair(
    name: str, sizes: tuple[int, int], structure: Structure, length: int = 4096
) -> Pair:
    """Common tokens in another order, and student tokens of two or three teacher tokens.

    Ids and columns are drawn from a fixed seed; the text has the chunks of ``CHUNK_PATTERN``.
    """
    generator = np.random.default_rng(0)
    common_student = np.sort(generator.permutation(sizes[0])[: structure.common])
    common_teacher = generator.permutation(sizes[1])[: structure.common]
    rest = np.setdiff1d(np.arange(sizes[0]), common_student)
    two = rest[: structure.two_piece]
    three = rest[structure.two_piece :]
    pieces = [generator.choice(common_teacher, (len(two), 2))]
    pieces.append(generator.choice(common_teacher, (len(three), 3)))
    projection = SparseProjection.from_entries(
        np.concatenate([common_student, np.repeat(two, 2), np.repeat(three, 3)]),
        np.concatenate([common_teacher, *(piece.flatten() for piece in pieces)]),
        np.ones(len(common_student) + 2 * len(two) + 3 * len(three)),
        sizes,
    )
    # Every third begins a word.
    teacher_tokens = [
        (b"t" if token % 3 else b" ") + token.to_bytes(3, "big") for token in range(sizes[1])
    ]
    student_tokens: list[bytes | None] = [None] * sizes[0]
    for student, teacher in zip(common_student.tolist(), common_teacher.tolist(), strict=True):
        student_tokens[student] = teacher_tokens[teacher]
    for students, found in ((two, pieces[0]), (three, pieces[1])):
        for student, row in zip(students.tolist(), found.tolist(), strict=True):
            student_tokens[student] = b"".join(teacher_tokens[piece] for piece in row)
    chunks = len(CHUNK_PATTERN)
    sizes_of_chunks = np.array(CHUNK_PATTERN * (length // chunks))
    places = [np.repeat(np.arange(len(sizes_of_chunks)), side) for side in sizes_of_chunks.T]
    return Pair(
        name=name,
        source="synthetic",
        projection=projection,
        student_tokens=student_tokens,
        teacher_tokens=teacher_tokens,
        student_ids=generator.choice(common_student, len(places[0])),
        teacher_ids=generator.choice(common_teacher, len(places[1])),
        student_chunk=places[0],
        teacher_chunk=places[1],
    )


def file_stem(name: str) -> str:
    """``Llama 3.2 x Qwen 3`` -> ``llama_3.2_x_qwen_3``."""
    return name.lower().replace(" ", "_")


def _repeated(ids: Ids, chunk: Ids, chunks: int, repeats: int) -> tuple[Ids, Ids]:
    shifted = [np.where(chunk >= 0, chunk + turn * chunks, NO_CHUNK) for turn in range(repeats)]
    return np.tile(ids, repeats), np.concatenate(shifted)


def _from(chunk: Ids, first: int) -> Ids:
    return np.where(chunk >= 0, chunk - first, NO_CHUNK)


def _split(buffer: bytes, lengths: list[int]) -> Tokens:
    tokens: list[bytes | None] = []
    start = 0
    for length in lengths:
        tokens.append(None if length < 0 else buffer[start : start + length])
        start += max(length, 0)
    return tokens
