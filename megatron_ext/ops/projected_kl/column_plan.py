"""How kernels walk the entries of a projection that are not simply one token for one."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnPlan:
    """Made once on the host from the whole projection and the layout."""

    has_unit_rows: bool
    """Every row on every rank sums to 1, to rounding, or is empty."""
