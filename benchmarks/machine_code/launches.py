"""The launches of every kernel, as argument types and constants: what a compiler needs of them."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final

from megatron_ext.ops.launch import HALF_FULL, LANE_CONFIGS, ROW_CONFIGS, LaunchConfig
from megatron_ext.ops.partition_kl.single_chunks import SINGLE_CONFIGS
from megatron_ext.ops.sorted_l1.kernel_steps import SELECTING, WRITING

_POINTERS: Final = {
    "*bf16": "logits student teacher gradient kept",
    "*i64": "origin column student_column teacher_column label row student_row teacher_row top",
    "*i32": "order offsets chunk student_order student_offsets student_chunk teacher_order "
    "teacher_offsets teacher_chunk columns pairs partner set bits target source entry blocks home "
    "slot best row_offsets row_source row_entry part_columns counter",
    "*i1": "members student_members teacher_members read excluded masked is_masked is_scaled "
    "is_compared",
    "*i8": "signs",
}
_TYPES: Final = {
    f"{name}_ptr": f"{kind}:16" for kind, names in _POINTERS.items() for name in names.split()
}
_HALF_FULL: Final = ("compare_kernel", "gradient_kernel", "residual_gradients_kernel")
_FLOATS: Final = ("temperature", "mixture", "weight")
_PADDED: Final = ("held_width", "padded_width", "padded_teacher_width")
"""Widths in memory; that of a vocabulary ends anywhere, and a row's stride is padded too."""


_WITH_PARTS: Final = (
    "single_kernel",
    "sweep_kernel",
    "residual_means_kernel",
    "column_sums_kernel",
    "summed_slopes_kernel",
    "residual_gradients_kernel",
    "compare_kernel",
    "gradient_kernel",
    "split_statistics_kernel",
)


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLaunch:
    """A kernel with the constants and the number of warps of one of its launches."""

    module: str
    """As in ``megatron_ext.ops.<module>``."""

    kernel: str
    label: str
    """Which launch it is, in words."""

    constants: dict[str, Any]
    config: LaunchConfig

    @property
    def has_parts(self) -> bool:
        """Whether each of its loops goes over a part of the columns, or of the cases."""
        return self.kernel in _WITH_PARTS

    @property
    def options(self) -> dict[str, int]:
        """Other options of the compiler."""
        is_aligned = self.kernel == "single_kernel" and self.constants["IS_ALIGNED"]
        return HALF_FULL if is_aligned or self.kernel in _HALF_FULL else {}

    @property
    def name(self) -> str:
        """Kernel, launch and configuration: the key of a report."""
        block, warps = self.config
        return f"{self.kernel} {self.label} {block}x{warps}"

    def function(self) -> Any:
        """The kernel."""
        return getattr(importlib.import_module(f"megatron_ext.ops.{self.module}"), self.kernel)

    def types(self) -> dict[str, str]:
        """Types of the arguments that are not constants; ``:16`` marks multiples of 16."""
        names = [name for name in self.function().arg_names if name not in self.constants]
        types = {name: _type_of(name) for name in names}
        if "valid_width" in names:
            # There, the width is the padded one in memory.
            types["width"] = "i32:16"
        return types


def _type_of(argument: str) -> str:
    if argument.endswith("_ptr"):
        return _TYPES.get(argument, "*fp32:16")
    if argument in _FLOATS:
        return "fp32"
    is_padded = argument in _PADDED or argument.endswith("stride")
    return "i32:16" if is_padded else "i32"


_SWEEP: Final = (LaunchConfig(2048, 4), LaunchConfig(2048, 8), LaunchConfig(4096, 8))
_PLAIN: Final = {"HAS_TEMPERATURE": False}
_NO_READ: Final = {"read_ptr": None, "HAS_READ": False, **_PLAIN}
_WHOLE: Final = {"HAS_LABELS": True, "HAS_GRADIENT": True, **_PLAIN}
_VOCAB: Final = {"HAS_SUMS": True, **_WHOLE}
_ALL_COLUMNS: Final = {"HAS_REST": False, "threshold_ptr": None, "rest_ptr": None}
_PROJECTED: Final = {"HAS_DOTS": True, **_ALL_COLUMNS, **_WHOLE}
_SINGLE: Final = {"STORES_SUMS": True, "STORES_GRADIENT": True, "HAS_LABELS": True, **_PLAIN}
_MATCHED: Final = {"moved_ptr": None, "MOVED": False, "DIRECTION": "forward", **_PLAIN}

_NO_TERM: Final = dict.fromkeys(
    ("label_ptr", "label_weight_ptr", "plain_peak_ptr", "plain_log_sum_ptr")
)
"""Without the cross-entropy."""

_SINGLE_CHUNK: Final = {"PARTS": 16, **_WHOLE}
_ONE: Final = (LaunchConfig(512, 2),)
_GROUP: Final = 32 * 32
"""Columns of 32 chunks: the count is one a column and chunk."""

_SUMMED: Final[tuple[tuple[str, str, int, dict[str, Any]], ...]] = (
    (
        "residual_means_kernel",
        "aligned",
        4,
        {"IS_ALIGNED": True, "COLUMNS": 32, "BLOCK": 128, **_PLAIN},
    ),
    ("column_sums_kernel", "short and long", 4, {"SUMS": 32, "ENTRIES": 64}),
    (
        "summed_slopes_kernel",
        "forward",
        4,
        {
            "DIRECTION": "forward",
            "PASS": "values",
            **_ALL_COLUMNS,
            "HAS_CROSSING": False,
            "HAS_DIAGNOSTICS": True,
            "COLUMNS": 8,
            "BLOCK": 64,
            **_PLAIN,
        },
    ),
    (
        "residual_gradients_kernel",
        "aligned",
        8,
        {"HAS_SINGLES": True, "IS_ALIGNED": True, "SUMS": 32, "BLOCK": 128, **_WHOLE},
    ),
)
"""Kernels of summed columns: launch, number of warps, constants."""

_ROWS: Final[tuple[tuple[str, str, str, dict[str, Any], tuple[LaunchConfig, ...]], ...]] = (
    (
        "softmax_kernels",
        "row_statistics_kernel",
        "members",
        {"HAS_MEMBERS": True, **_NO_READ},
        ROW_CONFIGS,
    ),
    (
        "softmax_kernels",
        "row_statistics_kernel",
        "plain",
        {"members_ptr": None, "HAS_MEMBERS": False, **_NO_READ},
        ROW_CONFIGS,
    ),
    *(
        (
            "projected_kl.single_kernel",
            "single_kernel",
            f"{order} {'with' if diagnostics else 'without'} diagnostics",
            {"IS_ALIGNED": order == "aligned", "HAS_DIAGNOSTICS": diagnostics, **_SINGLE_CHUNK},
            _ONE,
        )
        for order, diagnostics in (("aligned", True), ("aligned", False), ("any order", True))
    ),
    *(
        (
            "projected_kl.summed_kernels",
            kernel,
            label,
            {"CHUNKS": 32, **constants},
            (LaunchConfig(_GROUP, warps),),
        )
        for kernel, label, warps, constants in _SUMMED
    ),
    (
        "projected_kl.triton_kernels",
        "sweep_kernel",
        "forward values",
        {"DIRECTION": "forward", "PASS": "values", "HAS_DIAGNOSTICS": True, **_PROJECTED},
        _SWEEP,
    ),
    (
        "projected_kl.triton_kernels",
        "sweep_kernel",
        "forward values without diagnostics",
        {"DIRECTION": "forward", "PASS": "values", "HAS_DIAGNOSTICS": False, **_PROJECTED},
        _SWEEP,
    ),
    (
        "projected_kl.triton_kernels",
        "sweep_kernel",
        "reverse gradient",
        {"DIRECTION": "reverse", "PASS": "gradient", "HAS_DIAGNOSTICS": True, **_PROJECTED},
        _SWEEP,
    ),
    (
        "chunk_kernels",
        "token_gradient_kernel",
        "plain",
        {"members_ptr": None, "written_ptr": None, "HAS_MEMBERS": False, **_PLAIN},
        ROW_CONFIGS,
    ),
    (
        "vocab_kl.triton_kernels",
        "pair_statistics_kernel",
        "plain",
        {"HAS_PLAIN": False, **_NO_READ},
        LANE_CONFIGS,
    ),
    (
        "vocab_kl.triton_kernels",
        "vocab_kl_kernel",
        "forward",
        {**_VOCAB, "DIRECTION": "forward"},
        LANE_CONFIGS,
    ),
    (
        "vocab_kl.triton_kernels",
        "vocab_kl_kernel",
        "reverse sums",
        {**_VOCAB, "DIRECTION": "reverse", "HAS_GRADIENT": False},
        LANE_CONFIGS,
    ),
    (
        "vocab_kl.triton_kernels",
        "vocab_kl_kernel",
        "reverse gradient",
        {**_VOCAB, "DIRECTION": "reverse", "HAS_SUMS": False},
        LANE_CONFIGS,
    ),
    (
        "vocab_kl.triton_kernels",
        "vocab_kl_kernel",
        "jensen_shannon gradient at a temperature",
        {**_VOCAB, "DIRECTION": "jensen_shannon", "HAS_SUMS": False, "HAS_TEMPERATURE": True},
        LANE_CONFIGS,
    ),
    (
        "partition_kl.triton_kernels",
        "split_statistics_kernel",
        "every row",
        {"top_ptr": None, "HAS_UNSCALED": False, **_PLAIN},
        LANE_CONFIGS,
    ),
    (
        "partition_kl.triton_kernels",
        "split_statistics_kernel",
        "labels",
        {"HAS_UNSCALED": False, **_PLAIN},
        LANE_CONFIGS,
    ),
    (
        "partition_kl.triton_kernels",
        "single_rows_kernel",
        "forward",
        {"DIRECTION": "forward", "HAS_ARRIVED": False, **_SINGLE},
        SINGLE_CONFIGS,
    ),
    (
        "sorted_l1.selection_kernel",
        "select_kernel",
        "plain",
        {"excluded_ptr": None, "HAS_EXCLUDED": False, "BY_LOGIT": False, **_PLAIN},
        (SELECTING,),
    ),
    (
        "sorted_l1.selection_kernel",
        "select_kernel",
        "excluded",
        {"HAS_EXCLUDED": True, "BY_LOGIT": False, **_PLAIN},
        (SELECTING,),
    ),
    (
        "sorted_l1.selection_kernel",
        "select_kernel",
        "by logit",
        {
            "peak_ptr": None,
            "log_sum_ptr": None,
            "HAS_EXCLUDED": True,
            "BY_LOGIT": True,
            **_PLAIN,
        },
        (SELECTING,),
    ),
    (
        "sorted_l1.triton_kernels",
        "compare_places_kernel",
        "runs of 4,096",
        {"STUDENT_STEPS": 12, "TEACHER_STEPS": 12},
        (LaunchConfig(1024, 8),),
    ),
    ("sorted_l1.triton_kernels", "spread_kernel", "plain", _PLAIN | _NO_TERM, (WRITING,)),
    ("sorted_l1.triton_kernels", "spread_kernel", "labels", _PLAIN, (WRITING,)),
    ("matched_divergence.triton_kernels", "compare_kernel", "forward", _MATCHED, LANE_CONFIGS),
    (
        "matched_divergence.triton_kernels",
        "gradient_kernel",
        "forward",
        _MATCHED | _NO_TERM,
        LANE_CONFIGS[:1],
    ),
    ("matched_divergence.triton_kernels", "gradient_kernel", "labels", _MATCHED, LANE_CONFIGS[:1]),
    ("chunk_kernels", "chunk_means_kernel", "plain", _PLAIN, ROW_CONFIGS),
)
"""Module, kernel, launch, constants besides the block, and candidate configurations."""

CORE: Final = (
    "row_statistics_kernel members 8192x16",
    "row_statistics_kernel plain 4096x8",
    "single_kernel aligned with diagnostics 512x2",
    "vocab_kl_kernel forward 2048x8",
)
"""Names of the launches that the tests compile each time."""


def launches() -> Iterator[KernelLaunch]:
    """Every kernel that streams rows, in every configuration that may be chosen for it."""
    for module, kernel, label, constants, configs in _ROWS:
        for config in configs:
            yield KernelLaunch(
                module=module,
                kernel=kernel,
                label=label,
                constants=constants
                if "CHUNKS" in constants
                else {**constants, "BLOCK": config.block},
                config=config,
            )
