"""What holds for every test."""

from __future__ import annotations

import os

import torch
from hypothesis import settings

# Triton decides as it is imported whether kernels are compiled for a GPU or run in Python.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

# Enough for each run of the suite; all of them where everything is run.
settings.register_profile("suite", max_examples=40, deadline=None)
settings.register_profile("everything", max_examples=400, deadline=None)
settings.load_profile("everything" if os.environ.get("MEGATRON_EXT_ALL_TEXT") else "suite")
