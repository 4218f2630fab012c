"""Imports of optional packages, with the extras that bring them, of modules that moved, and of
modules of others that something is done to once they are loaded."""

from __future__ import annotations

import atexit
import gc
import sys
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Final

from megatron_ext.errors import MissingDependencyError

EXTRA_OF: Final = {
    "awkward": "fast",
    "gigatoken": "fast",
    "lm_eval": "lm-eval",
    "matplotlib": "train",
    "megatron": "train",
    "mistral_common": "demo",
    "numba": "train",
    "orjson": "data",
    "psutil": "train",
    "pyarrow": "data",
    "regex": "audit",
    "requests": "engines",
    "safetensors": "tokenizers",
    "sentencepiece": "sentencepiece",
    "setuptools": "train",
    "tensorboard": "watch",
    "tiktoken": "tiktoken",
    "tokenizers": "huggingface",
    "torch": "train",
    "torchao": "torchao",
    "tqdm": "data",
    "transformers": "transformers",
    "triton": "gpu",
    "wandb": "watch",
}
"""Import name of a package -> the smallest extra that brings it."""

BROUGHT_BY: Final = {
    "train": (
        *("train", "data", "audit", "tokenizers"),
        *("huggingface", "sentencepiece", "tiktoken", "fast"),
    ),
    "demo": (
        *("demo", "train", "data", "audit", "tokenizers"),
        *("huggingface", "sentencepiece", "tiktoken", "fast"),
    ),
}
"""Extra for all that a command needs -> the smaller extras that it brings."""

_PACKAGE_OF: Final = {"megatron": "megatron-core", "mistral_common": "mistral-common"}
"""Import name of a package -> its distribution, where the names differ."""


def package_of(name: str) -> str:
    """The distribution that brings the module with the import name ``name``."""
    return _PACKAGE_OF.get(name, name)


def missing_package(name: str, *, feature: str, extra: str | None = None) -> MissingDependencyError:
    """Error about the missing package with the import name ``name``, with its extra.

    Args:
        extra: Extra of ``BROUGHT_BY`` for the whole feature, to name if it brings the package.
    """
    smallest = EXTRA_OF[name]
    if extra is None or smallest not in BROUGHT_BY[extra]:
        extra = smallest
    return MissingDependencyError(package_of(name), extra=extra, feature=feature)


@contextmanager
def needed_packages(feature: str, *, extra: str | None = None) -> Iterator[None]:
    """Report the extra to install where an import in the block finds no package.

    Args:
        extra: As for ``missing_package``.

    Raises:
        MissingDependencyError: A package of ``EXTRA_OF`` is not installed.
    """
    try:
        yield
    except ModuleNotFoundError as error:
        if error.name not in EXTRA_OF:
            raise
        raise missing_package(error.name, feature=feature, extra=extra) from None


@contextmanager
def large_imports() -> Iterator[None]:
    """Import torch and megatron-core in the block without looking for garbage.

    There is none among what they make, and a third of their time would go into the search. As much
    would at the end of the process, which leaves it out too unless triton then reports leaks.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
        gc.freeze()
        if _reports_leaks():
            atexit.register(_thaw)
    finally:
        if was_enabled:
            gc.enable()


def _reports_leaks() -> bool:
    """Whether triton is built with nanobind, as from 3.9 on, which writes 35 lines on standard
    error about its objects that are there when the process has ended."""
    functions = vars(sys.modules.get("triton._C.libtriton", object)).values()
    return any(type(each).__name__ == "nb_func" for each in functions)


def _thaw() -> None:
    """Have the end of the process remove all objects, with one search instead of three."""
    gc.unfreeze()
    gc.disable()


_MOVED_IN_TRAINING: Final = {
    "configuration": {
        "arguments": "arguments",
        "config": "config",
        "exclusions": "exclusions",
        "features": "features",
        "loop_config": "loop",
        "lora_config": "lora",
        "model_config": "model",
        "model_section": "yaml_file",
        "rollout_config": "rollouts",
        "teacher_config": "teachers",
        "tokenizer_arguments": "tokenizer_arguments",
    },
    "checkpoints": {
        "checkpoint": "checkpoint",
        "checkpoint_folder": "folder",
        "checkpoint_manifest": "manifest",
        "checkpoint_reader": "reader",
        "checkpoint_slices": "slices",
        "checkpoint_tokenizer": "tokenizer",
        "checkpoint_writer": "writer",
        "export_adapter": "adapter_export",
        "export_checkpoint": "huggingface_export",
        "import_checkpoint": "huggingface_import",
        "model_check": "model_check",
        "optimizer_state": "optimizer_state",
        "saved_run": "saved_run",
    },
    "megatron_models": {
        "context_attention": "attention",
        "cpu_megatron": "cpu_megatron",
        "experts": "experts",
        "first_weights": "first_weights",
        "layers": "layers",
        "learning_parts": "learning_parts",
        "megatron_parts": "megatron_parts",
        "models": "models",
        "norms": "norms",
        "student_head": "student_head",
        "te_attention": "te_attention",
    },
}
"""Package in ``megatron_ext.training`` -> former name of a module beside it -> its name there."""

MOVED: Final = {
    "megatron_ext.alignment.chunk_class": "megatron_ext.alignment.alignment",
    "megatron_ext.atomic_file": "megatron_ext.files",
    "megatron_ext.engines.engine_config": "megatron_ext.engines.engine",
    "megatron_ext.extras": "megatron_ext.imports",
    "megatron_ext.moved": "megatron_ext.imports",
    "megatron_ext.version": "megatron_ext.constants",
    "megatron_ext.tokenizers.file_kind": "megatron_ext.tokenizers.tokenizer_files",
    "megatron_ext.training.data": "megatron_ext.training",
    "megatron_ext.training.cross_tokenizer": "megatron_ext.data",
    "megatron_ext.training.cross_tokenizer.corpus": "megatron_ext.documents",
    "megatron_ext.training.cross_tokenizer.packing": "megatron_ext.data",
    "megatron_ext.training.cross_tokenizer.packing.sample": "megatron_ext.data.aligner",
    "megatron_ext.training.megatron_lm": "megatron_ext.megatron_lm",
    "megatron_ext.training.sft": "megatron_ext.data",
    "megatron_ext.training.sft.batch": "megatron_ext.data.sft_dataset",
    "megatron_ext.training.sft.config": "megatron_ext.data.sft_records",
    "megatron_ext.training.sft.dataset": "megatron_ext.data.sft_dataset",
    "megatron_ext.training.masked_gpt_dataset": "megatron_ext.megatron_lm.masked_gpt_dataset",
    **{
        f"megatron_ext.training.{former}": f"megatron_ext.training.{package}.{present}"
        for package, modules in _MOVED_IN_TRAINING.items()
        for former, present in modules.items()
    },
}
"""Modules that programs of users import: former name -> present name. A module of a moved package
is found in the present package, unless it has a row of its own."""


class _MovedModules(MetaPathFinder, Loader):
    """Finder and loader of ``MOVED``; a module is the same object under both names."""

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        return None if _home(name) is None else ModuleSpec(name, self)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        home = _home(spec.name)
        assert home is not None
        warnings.warn(f"{spec.name} is {home} now", DeprecationWarning, stacklevel=2)
        module = import_module(home)
        # The import system sets the spec of the former name in the module it gets.
        spec.loader_state = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        assert module.__spec__ is not None
        module.__spec__ = module.__spec__.loader_state


def find_moved_modules() -> None:
    """Let ``import`` find moved modules, with a ``DeprecationWarning``; idempotent."""
    if not any(isinstance(finder, _MovedModules) for finder in sys.meta_path):
        # First, or a present package would load its modules again under their former names.
        sys.meta_path.insert(0, _MovedModules())


def _home(name: str) -> str | None:
    if not name.startswith("megatron_ext."):
        return None
    head, rest = name, ""
    while head:
        if head in MOVED:
            return MOVED[head] + rest
        head, _, last = head.rpartition(".")
        rest = f".{last}{rest}"
    return None


class AfterImport(MetaPathFinder):
    """Finder for ``sys.meta_path`` that calls a function with each of some modules once it is run.

    Finding and loading are left to the other finders, and all other modules are theirs alone.

    Args:
        names: Names of the modules.
        call: The function.
    """

    def __init__(self, names: Collection[str], call: Callable[[ModuleType], object]) -> None:
        self._names = names
        self._call = call

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        for finder in sys.meta_path if name in self._names else ():
            find = None if finder is self else getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = None if find is None else find(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _CallingLoader(spec.loader, self._call)
                return spec
        return None


class _CallingLoader(Loader):
    """Loader that calls a function with a module once another loader has executed it."""

    def __init__(self, loader: Loader, call: Callable[[ModuleType], object]) -> None:
        self._loader = loader
        self._call = call

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        # Restore the original loader, so that this one is not seen later.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._call(module)

    def __getattr__(self, name: str) -> Any:
        # Sources and resources of the module come from the real loader.
        return getattr(self._loader, name)
