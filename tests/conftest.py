"""What holds for every test."""

from __future__ import annotations

import os

from hypothesis import settings

# Enough for each run of the suite; all of them where everything is run.
settings.register_profile("suite", max_examples=40, deadline=None)
settings.register_profile("everything", max_examples=400, deadline=None)
settings.load_profile("everything" if os.environ.get("MEGATRON_EXT_ALL_TEXT") else "suite")
