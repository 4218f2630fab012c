"""Our flags and tokenizers under scripts laid out as Megatron-LM's releases."""

import json
import os
import runpy
from functools import cache

import pytest
from torch.distributed.run import main as torchrun

from tests.fork_server import run_forked
from tests.training.megatron_stand_in import LAYOUTS, REPOSITORY, make_checkout, report, run

NULL = ("--tokenizer-library", "null", "--vocab-size", "100")

STARTS = [("main", "fork"), ("0.16", "spawn"), ("main", "forkserver")]
"""Of worker processes; each under every release with MEGATRON_EXT_ALL_TEXT."""
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    STARTS = [(name, start) for name in LAYOUTS for start in ("fork", "spawn", "forkserver")]


@pytest.fixture(scope="module")
def checkout(tmp_path_factory):
    """Release -> the stand-in of its checkout."""
    made = {
        release: make_checkout(tmp_path_factory.mktemp(f"megatron-{release}"), release)
        for release in LAYOUTS
    }
    return made.__getitem__


@cache
def run_script(folder, *words):
    """What a script of a checkout reports when we run it."""
    return report(run("-m", "megatron_ext", "run", *words, cwd=folder))


@pytest.mark.parametrize("release", LAYOUTS)
def test_a_checkout_alone_builds_its_own_tokenizers(release, checkout):
    got = report(run("pretrain.py", cwd=checkout(release)))
    assert (got["ids"], got["data_ids"]) == ([-1], [-1])


@pytest.mark.parametrize("release", LAYOUTS)
def test_new_flags_build_our_tokenizers_everywhere(release, checkout):
    got = run_script(checkout(release), "pretrain.py", *NULL)
    assert (got["ids"], got["data_ids"], got["eod"]) == ([1, 2, 3], [1, 2, 3], 99)
    assert got["args"]["padded_vocab_size"] == 128
    assert got["args"]["tokenizer_type"] == "NullTokenizer"


@pytest.mark.parametrize(("release", "eod"), [("0.16", 100), ("main", 99)])
def test_an_old_type_means_what_it_means_in_its_checkout(release, eod, checkout):
    words = ("pretrain.py", "--tokenizer-type", "NullTokenizer", "--vocab-size", "100")
    finished = run("-m", "megatron_ext", "run", *words, cwd=checkout(release))
    got = report(finished)
    assert (got["data_ids"], got["eod"]) == ([1, 2, 3], eod)
    assert finished.stderr.count("use --tokenizer-library null") == 1


@pytest.mark.parametrize(("release", "start"), STARTS)
def test_worker_processes_build_our_tokenizers_too(release, start, checkout):
    got = run_script(checkout(release), "tools/preprocess.py", *NULL, "--start", start)
    assert got == {"ids": [[4, 5], [6]], "type": "NullTokenizer"}


def test_a_script_sees_what_it_would_see_without_us(checkout):
    folder = checkout("main")
    got = run_script(folder, "pretrain.py", *NULL)
    assert got["argv"] == ["pretrain.py", *NULL]
    assert (got["name"], got["file"], got["path"][0]) == ("__main__", "pretrain.py", str(folder))


def test_a_script_that_adds_some_of_our_flags_itself_runs(checkout):
    words = ("--tokenizer-prompt-format", "identity", "--tokenizer-mode", "multimodal")
    got = run_script(checkout("main"), "multimodal.py", *NULL, *words)
    assert got["args"]["tokenizer_prompt_format"] == "identity"
    assert got["args"]["tokenizer_type"] == "NullMultimodalTokenizer"
    assert got["ids"] == [1, 2, 3]


def test_the_help_of_a_script_lists_our_flags_among_its_own(checkout):
    words = ("run", "tools/preprocess.py", "--help")
    finished = run("-m", "megatron_ext", *words, cwd=checkout("0.16"))
    assert finished.returncode == 0
    for flag in ("--start", "--merge-file", "--tokenizer-library", "--tokenizer-engine"):
        assert flag in finished.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ("--tokenizer-type", "TikTokenizer", "--tokenizer-library", "null"),
            "--tokenizer-library null and --tokenizer-type TikTokenizer",
        ),
        (("--tokenizer-model", "absent.json"), "absent.json"),
        (
            ("--tokenizer-library", "sentencepiece", "--tokenizer-model", "ranks.json"),
            "the sentencepiece library cannot read this file",
        ),
        ((*NULL, "--legacy-tokenizer"), "--legacy-tokenizer and --tokenizer-library"),
    ],
    ids=["library", "missing-file", "other-library", "legacy"],
)
def test_what_a_user_can_mend_is_one_line_before_any_process_starts(words, message, checkout):
    folder = checkout("0.16")
    (folder / "ranks.json").write_text("[]", encoding="utf-8")
    script_words = ("run", "tools/preprocess.py", "--start", "fork", *words)
    finished = run("-m", "megatron_ext", *script_words, cwd=folder)
    assert (finished.returncode, finished.stdout) == (2, "")
    assert message in finished.stderr
    assert finished.stderr.startswith("megatron-ext: error: ")
    assert finished.stderr.count("\n") == 1


def test_the_old_systems_tokenizers_stay_where_they_are_asked_for(checkout):
    words = ("--tokenizer-type", "NullTokenizer", "--vocab-size", "9", "--legacy-tokenizer")
    assert run_script(checkout("0.16"), "pretrain.py", *words)["ids"] == [-1]


def test_a_release_without_the_old_system_says_so(checkout):
    words = ("run", "pretrain.py", "--tokenizer-type", "NullTokenizer", "--legacy-tokenizer")
    finished = run("-m", "megatron_ext", *words, cwd=checkout("main"))
    assert finished.returncode == 2
    assert "--legacy-tokenizer: nothing here tokenizes" in finished.stderr


INSTALL_LATE = """
import json, sys
from {builder} import build_tokenizer as under_another_name
import megatron.training.arguments
from megatron.training import global_vars
from megatron_ext.megatron_lm import install
{installs}
args = megatron.training.arguments.parse_args()
global_vars.set_global_variables(args)
print(json.dumps([under_another_name(args).tokenize("1 2"),
                  global_vars.get_tokenizer().tokenize("1 2")]))
"""


INSTALLS = [("", (), [-1]), ("install()", NULL, [1, 2]), ("install(); install()", NULL, [1, 2])]
"""As (what a script does after its imports, flags, ids); all under every release with
MEGATRON_EXT_ALL_TEXT."""
LATE = [("main", *INSTALLS[0]), ("0.16", *INSTALLS[1]), ("main", *INSTALLS[2])]
if os.environ.get("MEGATRON_EXT_ALL_TEXT"):
    LATE = [(name, *its) for name in LAYOUTS for its in INSTALLS]


@pytest.mark.parametrize(("release", "installs", "words", "ids"), LATE)
def test_a_script_may_install_the_patches_after_its_imports(
    release, installs, words, ids, checkout
):
    folder = checkout(release)
    builder = LAYOUTS[release].removesuffix(".py").replace("/", ".")
    (folder / "own.py").write_text(INSTALL_LATE.format(builder=builder, installs=installs))
    assert report(run("own.py", *words, cwd=folder)) == [ids, ids]


def test_a_checkout_comes_before_an_installed_megatron_core(checkout):
    """``tools/preprocess_data.py`` puts its checkout last, behind a release that lacks modules."""
    folder = checkout("main")
    installed = make_checkout(folder.parent / "installed", "0.16")
    run_elsewhere = ("-m", "megatron_ext", "run", str(folder / "tools" / "preprocess.py"))
    got = report(run(*run_elsewhere, *NULL, "--start", "fork", cwd=installed))
    assert got["ids"] == [[4, 5], [6]]


def test_a_script_that_has_nothing_of_megatron_runs_as_ever(tmp_path):
    (tmp_path / "own.py").write_text("import sys, json; print(json.dumps(sys.argv[1:])); exit(3)")
    finished = run("-m", "megatron_ext", "run", "own.py", "--flag", "--help", cwd=tmp_path)
    assert (finished.returncode, json.loads(finished.stdout)) == (3, ["--flag", "--help"])


REPLACED = """
import json
from argparse import Namespace
try:
    import megatron.core.tokenizers.utils.build_tokenizer as module
except ModuleNotFoundError:
    import megatron.core.tokenizers.text.utils.build_tokenizer as module
early = module.build_tokenizer
from megatron_ext.megatron_lm import install
install()
args = Namespace(tokenizer_library="null", vocab_size=7)
built = [module.build_tokenizer(args), early(args)]
print(json.dumps([[type(b).__module__, b.vocab_size] for b in built]), flush=True)
"""


def test_the_builder_of_the_installed_megatron_core_is_replaced(tmp_path):
    # In a process that has megatron-core already, whose import takes seconds.
    (tmp_path / "own.py").write_text(REPLACED, encoding="utf-8")
    code, printed, errors = run_forked(tmp_path, _run_as_main, "own.py")
    assert code == 0, errors
    assert json.loads(printed) == [["megatron_ext.tokenizers.text_tokenizer", 7]] * 2


def _run_as_main(script):
    runpy.run_path(script, run_name="__main__")


def _launch(words):
    os.environ |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    torchrun(["--standalone", "--nproc-per-node", "2", *words])


def test_torchrun_runs_a_script_on_every_rank(checkout):
    words = ("-m", "megatron_ext", "run", "pretrain.py", *NULL)
    # The launcher begins with torch imported; its ranks are programs.
    code, printed, errors = run_forked(checkout("main"), _launch, words)
    assert code == 0, errors
    # A rank may write between another's line and its end.
    lines = printed.replace("}{", "}\n{").splitlines()
    got = [json.loads(line) for line in lines if line.startswith("{")]
    assert sorted(rank["args"]["rank"] for rank in got) == [0, 1]
    assert [rank["ids"] for rank in got] == [[1, 2, 3]] * 2
