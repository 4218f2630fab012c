"""What a spawned rank runs: HuggingFace folders to checkpoints of ours and back."""

from megatron_ext.cli.main import main
from megatron_ext.training.checkpoints.huggingface_export import export_huggingface
from megatron_ext.training.checkpoints.huggingface_import import import_huggingface


def round_trips(rank, folders, root):
    """Each folder imported to ``root/imported/NAME`` and exported to ``root/exported/NAME``."""
    for name, folder in folders.items():
        imported, exported = root / "imported" / name, root / "exported" / name
        if name == "qwen2":
            # As a user does it.
            main(["import-hf", str(folder), str(imported)])
            main(["export-hf", str(imported), str(exported), "--max-shard-size", "0.00006"])
        else:
            import_huggingface(folder, imported)
            export_huggingface(imported, exported, max_shard_bytes=100_000)
