"""Import of a HuggingFace checkpoint as one of ours: the same numbers, in the same dtypes.

It runs megatron-core in one process on the CPU, whether there is a GPU or not.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from math import prod
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedTensor, apply_factories
from megatron.core.models.gpt import GPTModel

from megatron_ext.distributed import process_groups
from megatron_ext.distributed.layout import Layout, launched_processes
from megatron_ext.distributed.process_groups import ProcessGroups
from megatron_ext.errors import CheckpointError, DistributedError
from megatron_ext.huggingface.checkpoint_files import (
    SIDE_FOLDER,
    CheckpointFiles,
    copy_side_files,
    has_tokenizer,
    is_checkpoint_folder,
)
from megatron_ext.huggingface.model_settings import model_settings
from megatron_ext.huggingface.tensor_files import TensorReader, check_target
from megatron_ext.huggingface.tensor_map import TensorMap
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.checkpoint import save_checkpoint
from megatron_ext.training.checkpoints.model_check import checked
from megatron_ext.training.checkpoints.tokenizer import row_misfit
from megatron_ext.training.configuration.config import ModelConfig, ParallelConfig, TrainingConfig
from megatron_ext.training.megatron_models import cpu_megatron
from megatron_ext.training.megatron_models.first_weights import corner_of, tensor_of
from megatron_ext.training.megatron_models.models import build_gpt_model
from megatron_ext.training.run_folder import TOKENIZER_FOLDER


@contextmanager
def lone_process() -> Iterator[ProcessGroups]:
    """Process groups of this process alone, over gloo, destroyed at the end.

    An existing default group of one process is used.

    Raises:
        DistributedError: The process is one of several.
        RuntimeError: The process uses CUDA.
    """
    if launched_processes() > 1:
        raise DistributedError(
            "one process does this alone", got=launched_processes(), fix="start it without torchrun"
        )
    cpu_megatron.install()
    is_new = not dist.is_initialized()
    if is_new:
        store = torch._C._distributed_c10d.HashStore()
        dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        groups = process_groups.initialize(Layout())
        yield replace(groups, device=torch.device("cpu"))
    finally:
        parallel_state.destroy_model_parallel()
        if is_new:
            dist.destroy_process_group()


_DTYPES: Final = {
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}


def import_huggingface(folder: Path, output: Path) -> Path:
    """Write a HuggingFace folder as a checkpoint for runs, teachers and exports.

    Tensors are mapped from files beside ``output``, as large as the checkpoint, so that the process
    needs memory for a few tensors only.

    Args:
        folder: ``config.json``, safetensors files, and a tokenizer where there is one.
        output: New or empty folder, which becomes a folder of checkpoints with one in it.

    Returns:
        The checkpoint, ``output/iter_0000000``.

    Raises:
        CheckpointError: The folder cannot be read, its tokenizer is another model's, or the output
            cannot be written.
    """
    _check_folders(folder, output)
    files = CheckpointFiles(folder)
    settings = model_settings(files)
    length = min(settings["rotary_longest"] or 1024, 1024)
    model = ModelConfig(**settings, seq_length=length, hf=str(folder))
    _, tensors = checked(files, model)
    tokenizer = None
    if has_tokenizer(folder):
        tokenizer = build_tokenizer(TokenizerConfig(model=str(folder)))
    if tokenizer is not None:
        _check_rows(tokenizer.vocab_size, settings["vocab_size"], folder)
    run: dict[str, Any] = {"config": {"student": asdict(model)}}
    if tokenizer is not None:
        run["tokenizer_fingerprint"] = tokenizer.fingerprint()
    with lone_process() as groups, _scratch(output) as scratch:
        beside = _assets(folder, tokenizer, scratch)
        with TensorReader(files) as reader:
            state = _state(_outline(model, groups), tensors, files, reader, scratch)
            state |= {"iteration": 0, "run": run}
            return save_checkpoint(output, 0, state, groups=groups, keep=1, files=beside)


def _check_folders(folder: Path, output: Path) -> None:
    if not is_checkpoint_folder(folder):
        raise CheckpointError(
            "no HuggingFace checkpoint found",
            where=folder,
            expected="a folder with config.json and safetensors files",
        )
    check_target(output)


def _check_rows(vocab_size: int, rows: int, folder: Path) -> None:
    misfit = row_misfit(vocab_size, rows)
    if misfit is not None:
        raise CheckpointError(
            "the tokenizer in the folder is another model's",
            where=folder,
            got=misfit,
            fix="replace its files by those of the model's own, or remove them",
        )


@contextmanager
def _scratch(output: Path) -> Iterator[Path]:
    """A temporary folder on the disk of the output."""
    output.parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(
        prefix=f".{output.name}.", dir=output.parent, ignore_cleanup_errors=True
    ) as folder:
        yield Path(folder)


def _assets(
    folder: Path, tokenizer: MegatronTokenizerText | None, scratch: Path
) -> tuple[Path, Path]:
    """Write the folders that a checkpoint includes beside its tensors."""
    folders = scratch / TOKENIZER_FOLDER, scratch / SIDE_FOLDER
    if tokenizer is not None:
        tokenizer.save_pretrained(folders[0])
    copy_side_files(folder, folders[1])
    return folders


def _outline(model: ModelConfig, groups: ProcessGroups) -> GPTModel:
    """The model on the meta device, with as many vocabulary rows as the checkpoint."""
    assert model.vocab_size is not None, "every config.json has it"
    nowhere = torch.device("meta")
    with nowhere:
        return build_gpt_model(
            model,
            padded_vocab_size=model.vocab_size,
            parallel=ParallelConfig(),
            training=TrainingConfig(train_iters=1),
            groups=replace(groups, device=nowhere),
        )


def _state(
    outline: GPTModel,
    tensors: TensorMap,
    files: CheckpointFiles,
    reader: TensorReader,
    scratch: Path,
) -> dict[str, Any]:
    """The sharded state to save: the outline's, filled with the checkpoint's numbers."""
    state: dict[str, Any] = outline.sharded_state_dict()
    apply_factories(state)
    dtypes = _dtypes(tensors, files)

    def filled(shard: Any, number: int) -> Any:
        if not isinstance(shard, ShardedTensor):
            return shard
        data = _mapped(scratch / str(number), shard.local_shape, dtypes[shard.key])
        row, column = corner_of(shard)
        reader.fill(data, tensor_of(shard, tensors), row=row, column=column)
        return replace(shard, data=data, dtype=data.dtype)

    numbers = iter(range(1 << 30))
    return {
        name: [filled(shard, next(numbers)) for shard in value]
        if isinstance(value, list)
        else filled(value, next(numbers))
        for name, value in state.items()
    }


def _dtypes(tensors: TensorMap, files: CheckpointFiles) -> dict[str, torch.dtype]:
    """Dtype of each megatron-core tensor over all layers: one that holds all its parts' dtypes."""
    dtypes: dict[str, torch.dtype] = {}
    for tensor in tensors.megatron_tensors():
        for block in tensor.blocks:
            stored = files.tensors[block.name]
            if stored.read_as not in _DTYPES:
                raise CheckpointError(
                    f"the tensor {block.name} is of a type that is not read",
                    where=stored.file,
                    got=stored.dtype,
                    expected=f"one of {', '.join(_DTYPES)}",
                )
            dtype = _DTYPES[stored.read_as]
            dtypes[tensor.key] = torch.promote_types(dtypes.get(tensor.key, dtype), dtype)
    return dtypes


def _mapped(file: Path, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """A tensor mapped from a file, so that the system can write it out where memory runs short."""
    size = prod(shape)
    tensor: torch.Tensor = torch.from_file(
        str(file), shared=True, size=size, dtype=dtype, device="cpu"
    )
    # The mapping keeps the bytes until the tensor is gone.
    file.unlink()
    return tensor.view(shape)
