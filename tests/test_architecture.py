"""What may import what, and how soon the package and the command line answer."""

import ast
from functools import cache
from graphlib import TopologicalSorter
from pathlib import Path

import grimp
import pytest
from importlinter.api import read_configuration
from importlinter.cli import EXIT_STATUS_SUCCESS, lint_imports

from megatron_ext.training.configuration.arguments import config_flags
from tests.fork_server import run_python

PYPROJECT = str(Path(__file__).parents[1] / "pyproject.toml")
PACKAGE = Path(__file__).parents[1] / "megatron_ext"
CONTRACTS = [contract["id"] for contract in read_configuration(PYPROJECT)["contracts_options"]]
SECONDS = 0.3
"""Of processor time: whatever else the machine does."""

PARAMETERS = 10
"""Most of a function, in the packages that keep to it; options belong into a frozen class."""

HEAVY = ("torch", "megatron", "transformers", "triton", "numpy", "yaml", "tokenizers", "tiktoken")
"""Everything that is not the standard library and takes time to load."""

_IMPORT = "import megatron_ext"
_HELP = """
from megatron_ext.cli.main import main
try:
    main({arguments})
except SystemExit as exit:
    assert exit.code == 0, exit.code
"""
_MEASURE = """
import sys, time
begin = time.process_time()
{code}
seconds = time.process_time() - begin
print(seconds, *{{name.split(".")[0] for name in sys.modules}}, file=sys.stderr)
"""


@pytest.fixture(scope="module")
def graph_cache(tmp_path_factory):
    """The imports of each file, for all contracts."""
    return str(tmp_path_factory.mktemp("graph"))


@pytest.mark.parametrize("contract", CONTRACTS)
def test_the_import_contract_is_kept(contract, graph_cache, capsys):
    status = lint_imports(
        config_filename=PYPROJECT, limit_to_contracts=(contract,), cache_dir=graph_cache
    )
    assert status == EXIT_STATUS_SUCCESS, capsys.readouterr().out


@pytest.mark.parametrize(
    "code",
    [_IMPORT, _HELP.format(arguments=["--help"]), _HELP.format(arguments=["--version"])],
    ids=["import", "help", "version"],
)
def test_the_package_and_its_help_answer_at_once_and_load_nothing_heavy(code):
    seconds, modules = _fresh_interpreter(code)
    assert modules.isdisjoint(HEAVY)
    # What else runs on the core can make any one of three slow.
    assert seconds < SECONDS or any(_fresh_interpreter(code)[0] < SECONDS for _ in range(2))


def test_the_help_of_a_verb_does_not_wait_for_torch():
    _, modules = _fresh_interpreter(_HELP.format(arguments=["distill", "--help"]))
    assert modules.isdisjoint({"torch", "megatron", "transformers", "triton"})


def test_every_flag_has_a_name_of_its_own():
    names = [flag.name for flag in config_flags()]
    assert len(names) == len(set(names))


def test_every_configuration_key_says_what_it_is():
    assert [flag.name for flag in config_flags() if not flag.help.endswith(".")] == []


def test_no_function_but_a_kernel_has_more_than_ten_parameters():
    long = set()
    for path, functions in _functions().items():
        for node in functions:
            count = sum(each.arg not in ("self", "cls", "ctx") for each in _taken(node))
            if count > PARAMETERS and not _is_kernel(node):
                long.add(f"{path}: {node.name}")
    assert long == LONG_CONSTRUCTORS


def test_no_module_imports_itself_through_others():
    """Imports inside functions count; those for a type checker alone do not."""
    graph = grimp.build_graph("megatron_ext", exclude_type_checking_imports=True, cache_dir=None)
    imports = {name: graph.find_modules_directly_imported_by(name) for name in graph.modules}
    TopologicalSorter(imports).prepare()


def test_the_package_stays_small_enough_to_find_ones_way_in():
    files = [*PACKAGE.rglob("*.py")]
    assert len(files) <= MOST_FILES
    assert len({file.parent for file in files}) <= MOST_FOLDERS


@cache
def _functions():
    """Path in the package -> the functions of its file."""
    trees = {
        path.relative_to(PACKAGE).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in PACKAGE.rglob("*.py")
    }
    return {
        path: [node for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)]
        for path, tree in trees.items()
    }


def _taken(node):
    """The parameters of a function."""
    return (*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs)


def _is_kernel(node):
    return any(
        ast.unparse(each).startswith(("triton.jit", "kernel(")) for each in node.decorator_list
    )


def _fresh_interpreter(code):
    """Seconds that ``code`` takes in a new interpreter, and the packages it has loaded then."""
    seconds, *modules = run_python(_MEASURE.format(code=code)).stderr.split()
    assert "megatron_ext" in modules
    return float(seconds), set(modules)


LONG_CONSTRUCTORS = {
    # Each keyword is one that users write: an option of a library, or of a tokenizer's metadata.
    "tokenizers/libraries/byte_level.py: __init__",
    "tokenizers/libraries/huggingface.py: __init__",
    "tokenizers/libraries/sentencepiece.py: __init__",
    "tokenizers/libraries/tiktoken.py: __init__",
    "tokenizers/text_tokenizer.py: __init__",
    "data/collator.py: __init__",
}

MOST_FILES = 534
MOST_FOLDERS = 45

READS_CONFIGURATION = {
    # The configuration itself, its table of exclusions, and its parts.
    "training/configuration/config.py",
    "training/configuration/exclusions.py",
    "training/run_plan.py",
    "training/run_folder.py",
    # The reading of inputs, and checks on the way.
    "training/inputs.py",
    "training/run_loss.py",
    "training/start_agreement.py",
    "training/run_data.py",
    "training/run_sources.py",
    "training/teachers/identity.py",
    "training/teachers/target_checks.py",
    # What begins a run, a recording or a plan.
    "cli/cache_teacher.py",
    "cli/distill.py",
    "cli/output.py",
    "training/distill.py",
    "training/dry_run/dry_run.py",
    "megatron_lm/loop_arguments.py",
    "megatron_lm/pretrain.py",
    "training/teachers/import_recording.py",
    "training/teachers/recording.py",
}
"""Where a function may take the whole configuration; everything below takes a part of it."""


def test_no_function_below_the_reading_of_inputs_takes_the_whole_configuration():
    takers = {
        path
        for path, functions in _functions().items()
        if any(
            each.annotation and "DistillConfig" in ast.unparse(each.annotation)
            for node in functions
            for each in _taken(node)
        )
    }
    assert takers == READS_CONFIGURATION
