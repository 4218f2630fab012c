"""A projection between two sharded vocabularies. Vps, Vpt local columns, Vt the teacher's."""

from __future__ import annotations

from typing import NamedTuple

import torch

from megatron_ext.ops.projected_kl.column_plan import ColumnPlan


class ShardedProjection(NamedTuple):
    """This rank's rows of W, and which of its teacher columns they reach."""

    weight: torch.Tensor
    """CSR [Vps, Vt], this rank's rows of the projection and all its columns."""

    weight_transposed: torch.Tensor
    """CSR [Vt, Vps], the same entries."""

    row_mass: torch.Tensor
    """[Vps], sum of each row of ``weight``."""

    reachable: torch.Tensor
    """bool [Vpt], this rank's teacher columns with an entry in any rank's ``weight``."""

    plan: ColumnPlan | None = None
    """How kernels walk the entries; None: there are none to walk them."""

    @property
    def has_unit_rows(self) -> bool:
        """Whether every row on every rank is known to sum to 1 or 0."""
        return self.plan is not None and self.plan.has_unit_rows
