"""What the fork server imports last, so that its children begin with little to do.

Nothing that has been imported is ever looked at again by the garbage collector: each child would
copy the pages of all objects for it.
"""

from __future__ import annotations

import gc

import tests.training.rank_functions  # noqa: F401

gc.collect()
gc.freeze()
