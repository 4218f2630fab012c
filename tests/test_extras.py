"""Without a package that an extra brings, one line says which extra to install."""

import gc
import re
import sys
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest

from megatron_ext.errors import MissingDependencyError
from megatron_ext.imports import (
    BROUGHT_BY,
    EXTRA_OF,
    large_imports,
    missing_package,
    needed_packages,
)
from tests.fork_server import run_python

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"
COLLECTIONS = ("examples", "test", "docs", "dev")
"""Extras for those who work on the repository: no error names them."""

WITHOUT_TORCH = """
import sys

class WithoutTorch:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, WithoutTorch())
import megatron_ext
from megatron_ext.cli.main import main
from megatron_ext.errors import MissingDependencyError

needing = ("megatron_ext.losses",) + tuple(f"megatron_ext.{name}" for name in megatron_ext.__all__)
for name in needing:
    module, _, attribute = name.rpartition(".")
    try:
        exec(f"from {module} import {attribute}")
    except MissingDependencyError as error:
        print(name, error)
for verb in ("export-hf", "import-hf"):
    try:
        main([verb, "from", "to"])
    except SystemExit as exit:
        assert exit.code == 2, exit.code
"""


def test_without_torch_every_name_and_verb_names_the_extra_that_brings_it(tmp_path):
    path = {"PYTHONPATH": str(PYPROJECT.parent)}
    finished = run_python(WITHOUT_TORCH, cwd=tmp_path, env=path)
    needs = str(missing_package("torch", feature=""))
    failed = {line.split()[0]: line for line in finished.stdout.splitlines()}
    assert all(line.endswith(needs) for line in failed.values())
    assert {"megatron_ext.losses", "megatron_ext.CrossTokenizerCollator"} <= failed.keys()
    assert failed.keys().isdisjoint({"megatron_ext.TokenAligner", "megatron_ext.SparseProjection"})
    assert finished.stderr.splitlines() == [
        f"megatron-ext: error: megatron-ext {verb}{needs}" for verb in ("export-hf", "import-hf")
    ]


WITHOUT_EXTRAS = """
import sys

from megatron_ext.imports import EXTRA_OF

class WithoutExtras:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in EXTRA_OF:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name.partition(".")[0])

sys.meta_path.insert(0, WithoutExtras())
from megatron_ext.cli.main import main

for verb in sys.argv[1:]:
    try:
        main([verb, "--help"])
    except SystemExit as exit:
        assert exit.code == 0, (verb, exit.code)
"""


def test_a_verb_has_its_help_before_anything_is_installed():
    verbs = ["distill", "sft", "train", "serve-teacher", "demo"]
    finished = run_python(WITHOUT_EXTRAS, *verbs, env={"PYTHONPATH": str(PYPROJECT.parent)})
    assert finished.stderr == ""
    assert re.findall(r"^usage: megatron-ext (\S+) ", finished.stdout, re.MULTILINE) == verbs


def test_a_package_that_no_extra_brings_is_missing_as_ever():
    with pytest.raises(ModuleNotFoundError), needed_packages("this"):
        import no_such_package  # noqa: F401


@pytest.mark.parametrize("name", EXTRA_OF)
def test_an_extra_brings_the_packages_that_are_said_to_be_its_own(name):
    error = missing_package(name, feature="this")
    assert isinstance(error, MissingDependencyError)
    package = re.search(r"the package (\S+),", str(error))
    # gigatoken answers in arrays of awkward, and brings it.
    brought = {"awkward": "gigatoken"}.get(package[1], package[1])
    assert brought in requirements()[EXTRA_OF[name]]


def test_every_package_of_an_extra_has_an_extra_to_name():
    named = {str(missing_package(name, feature="")).split()[3].rstrip(",") for name in EXTRA_OF}
    extras = [packages for extra, packages in requirements().items() if extra not in COLLECTIONS]
    assert {package for packages in extras for package in packages} - {"megatron-ext"} <= named


def requirements():
    """The packages that each extra of ``pyproject.toml`` names."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    return {
        extra: {re.split(r"[^\w-]", package)[0] for package in packages}
        for extra, packages in extras.items()
    }


@pytest.mark.parametrize("error", [None, ImportError])
def test_large_imports_look_for_no_garbage_and_what_follows_does(error):
    with pytest.raises(error) if error else nullcontext(), large_imports():
        assert not gc.isenabled()
        if error:
            raise error
    assert gc.isenabled()


def test_what_reports_leaks_finds_none_at_the_end_of_the_process(monkeypatch):
    called = []
    monkeypatch.setattr("atexit.register", called.append)
    monkeypatch.delitem(sys.modules, "triton._C.libtriton", raising=False)
    with large_imports():
        pass
    assert not called
    assert gc.get_freeze_count()
    # As nanobind's functions.
    library = SimpleNamespace(init=type("nb_func", (), {})())
    monkeypatch.setitem(sys.modules, "triton._C.libtriton", library)
    with large_imports():
        pass
    (at_exit,) = called
    at_exit()
    gc.enable()
    assert not gc.get_freeze_count()


def test_every_file_of_the_package_is_in_the_wheel():
    root = PYPROJECT.parent / "megatron_ext"
    patterns = tomllib.loads(PYPROJECT.read_text())["tool"]["setuptools"]["package-data"]
    data = {file for pattern in patterns["megatron_ext"] for file in root.glob(pattern)}
    files = {
        file for file in root.rglob("*") if file.is_file() and file.parent.name != "__pycache__"
    }
    assert {file for file in files if file.suffix not in (".md", ".py")} == data


def test_the_extra_for_everything_has_every_extra_of_users():
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    assert extras.keys() - within("all") == {*COLLECTIONS}


@pytest.mark.parametrize("extra", BROUGHT_BY)
def test_the_extra_of_a_verb_brings_the_smaller_ones(extra):
    assert {*BROUGHT_BY[extra]} == within(extra)


def test_a_verb_names_one_extra_for_all_that_it_needs():
    for package in ("tqdm", "torch", "tokenizers"):
        error = missing_package(package, feature="megatron-ext distill", extra="train")
        assert 'pip install "megatron-ext[train]"' in str(error)
    other = missing_package("transformers", feature="megatron-ext distill", extra="train")
    assert 'pip install "megatron-ext[transformers]"' in str(other)


def within(extra):
    """An extra, and those that it brings."""
    extras = tomllib.loads(PYPROJECT.read_text())["project"]["optional-dependencies"]
    found = re.findall(r"megatron-ext\[([\w,-]+)\]", " ".join(extras[extra]))
    names = [name for names in found for name in names.split(",")]
    return {extra}.union(*map(within, names))
