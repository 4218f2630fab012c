"""Resources of a run, computed without starting it."""

from megatron_ext.training.dry_run.dry_run import dry_run, start_summary

__all__ = ["dry_run", "start_summary"]
