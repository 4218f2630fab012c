"""The pieces that put our flags and tokenizers under Megatron-LM, one by one."""

import sys
from argparse import ArgumentParser, Namespace
from importlib import import_module
from types import ModuleType

import pytest

from megatron_ext.errors import ConfigError, TokenizerError
from megatron_ext.megatron_lm import script
from megatron_ext.megatron_lm.arguments import (
    with_our_flags,
    with_our_tokenizers,
    with_tokenizer_of_checkpoint,
    with_whole_tokenizers,
)
from megatron_ext.megatron_lm.script import Patch, PatchedModules
from megatron_ext.tokenizers import MegatronTokenizer, TokenizerConfig, build_tokenizer
from megatron_ext.tokenizers.namespace import config_from_namespace
from tests.training.megatron_stand_in import make_checkout


def parsed(words, *own):
    """A release's parser with the flags ``own``, as it parses under our flags."""

    def add_tokenizer_args(parser):
        for name, options in own:
            parser.add_argument(name, **options)
        return parser

    parser = with_our_flags(add_tokenizer_args)(ArgumentParser(exit_on_error=False))
    return parser.parse_args(words.split())


SWITCH = {"action": "store_true"}


def test_new_flags_leave_out_special_tokens_though_a_release_puts_them_in():
    own = (
        ("--tokenizer-hf-include-special-tokens", {**SWITCH, "default": True}),
        ("--tokenizer-hf-no-include-special-tokens", {**SWITCH, "default": False}),
    )
    words = "--tokenizer-library null --vocab-size 9"
    assert parsed(words, *own).tokenizer_hf_include_special_tokens is False
    words += " --tokenizer-hf-include-special-tokens"
    assert parsed(words, *own).tokenizer_hf_include_special_tokens is True


def test_without_tokenizer_flags_the_scripts_own_default_type_stays():
    args = parsed("", ("--tokenizer-type", {"default": None}))
    assert args.tokenizer_type is None
    assert not hasattr(args, "tokenizer_type_implied")


@pytest.mark.parametrize(
    ("words", "name"),
    [
        ("huggingface", "HuggingFaceTokenizer"),
        ("huggingface --tokenizer-mode sft", "SFTTokenizer"),
        (
            "huggingface --tokenizer-mode multimodal --tokenizer-prompt-format auto",
            "MultimodalTokenizer",
        ),
        ("sentencepiece", "GPTSentencePieceTokenizer"),
        ("tiktoken --tokenizer-mode sft", "TikTokenizer"),
        ("megatron --tokenizer-model GPT2BPETokenizer", "GPT2BPETokenizer"),
        ("megatron --tokenizer-model BertWordPieceCase", "BertWordPieceCase"),
        ("megatron --tokenizer-model megatron-gpt-345m", "GPT2BPETokenizer"),
        ("byte-level", "NullTokenizer"),
        ("null --vocab-size 9", "NullTokenizer"),
        ("null --tokenizer-mode multimodal --vocab-size 9", "NullMultimodalTokenizer"),
    ],
)
def test_new_flags_imply_the_nearest_old_type_for_code_that_reads_it(words, name):
    args = parsed(f"--tokenizer-library {words}")
    assert args.tokenizer_type == name
    assert args.tokenizer_type_implied


@pytest.mark.parametrize("words", ["--tokenizer-library tiktoken", ""], ids=["library", "none"])
def test_a_model_that_a_checkpoint_will_replace_need_not_exist(words):
    words += " --tokenizer-model absent.json"
    with pytest.raises(TokenizerError, match=r"absent\.json"):
        parsed(words)
    args = parsed(f"{words} --use-checkpoint-args", ("--use-checkpoint-args", SWITCH))
    assert args.tokenizer_model == "absent.json"


def test_the_padded_size_is_set_once_and_only_where_a_model_asks():
    build = with_our_tokenizers(lambda args: None)
    null = {"tokenizer_library": "null", "vocab_size": 100}
    model = {"make_vocab_size_divisible_by": 64, "tensor_model_parallel_size": 2}
    for extra, padded in (
        ({**model}, 128),
        ({**model, "padded_vocab_size": 999}, 999),
        ({**model, "pad_vocab_size": False, "padded_vocab_size": None}, None),
        ({"padded_vocab_size": None}, None),
    ):
        args = Namespace(**null, **extra)
        build(args)
        assert args.padded_vocab_size == padded


def test_overrides_reach_the_tokenizer():
    build = with_our_tokenizers(lambda args: None)
    args = Namespace(tokenizer_library="null", vocab_size=100)
    assert build(args, vocab_size=7).vocab_size == 7


def test_a_checkpoint_restores_our_flags_with_the_old_type():
    saved = Namespace(tokenizer_type="GPTSentencePieceTokenizer", tokenizer_type_implied=True)
    saved.tokenizer_library, saved.tokenizer_mode = "sentencepiece", "sft"

    def load(args, load_arg="load"):
        args.tokenizer_type = saved.tokenizer_type
        return args, saved

    args = Namespace(use_tokenizer_model_from_checkpoint_args=True, tokenizer_engine="auto")
    with_tokenizer_of_checkpoint(load)(args, load_arg="pretrained_checkpoint")
    assert (args.tokenizer_library, args.tokenizer_mode) == ("sentencepiece", "sft")
    assert args.tokenizer_type_implied
    assert args.tokenizer_engine == "auto"


def test_an_old_checkpoint_restores_its_type_over_new_flags():
    saved = Namespace(tokenizer_type="TikTokenizer")
    load = with_tokenizer_of_checkpoint(lambda args: (args, saved))
    args = Namespace(
        use_tokenizer_model_from_checkpoint_args=True,
        tokenizer_type="TikTokenizer",
        tokenizer_type_implied=True,
        tokenizer_library="null",
    )
    load(args)
    assert not hasattr(args, "tokenizer_library")
    assert not hasattr(args, "tokenizer_type_implied")


def test_the_prompt_format_of_a_checkpoint_takes_the_place_of_either_flag():
    own = ("--sft-tokenizer-prompt-format", {"default": "nemotron-h-aligned"})
    words = "--tokenizer-library null --vocab-size 9 --tokenizer-mode sft"
    saved = parsed(f"{words} --sft-tokenizer-prompt-format identity", own)
    load = with_tokenizer_of_checkpoint(lambda args: (args, saved))
    for flag in ("--sft-tokenizer-prompt-format", "--tokenizer-prompt-format"):
        args = parsed(f"{words} {flag} default", own)
        args.use_tokenizer_model_from_checkpoint_args = True
        load(args)
        assert config_from_namespace(args).prompt_format == "identity"


@pytest.mark.parametrize("wanted", [True, False])
def test_flags_stay_where_no_checkpoint_names_a_tokenizer(wanted):
    args = Namespace(tokenizer_library="null", use_tokenizer_model_from_checkpoint_args=wanted)
    load = with_tokenizer_of_checkpoint(lambda args: args if wanted else (args, Namespace()))
    load(args)
    assert args.tokenizer_library == "null"


@pytest.fixture
def tokenizer():
    return build_tokenizer(TokenizerConfig(library="null", vocab_size=12, null_eod_id=0))


def test_a_checkpoint_gets_all_that_rebuilds_the_tokenizer(tokenizer, tmp_path):
    save = with_whole_tokenizers(lambda *args: pytest.fail("the original was called"))
    for _ in range(2):
        save(tokenizer, Namespace(tokenizer_type="NullTokenizer"), str(tmp_path))
    again = MegatronTokenizer.from_pretrained(tmp_path / "tokenizer")
    assert (again.vocab_size, again.eod) == (12, 0)


def test_only_the_first_rank_saves_the_tokenizer(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("RANK", "1")
    with_whole_tokenizers(lambda *args: None)(tokenizer, None, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_tokenizers_that_are_not_ours_and_object_stores_keep_the_original(tokenizer, tmp_path):
    calls = []
    save = with_whole_tokenizers(lambda *args: calls.append(args))
    save(object(), None, tmp_path)
    save(tokenizer, None, "msc://bucket/iter_1")
    assert len(calls) == 2


def test_a_tokenizer_that_cannot_be_saved_does_not_end_the_run(tokenizer, tmp_path):
    (tmp_path / "tokenizer").write_text("in the way")
    with pytest.warns(UserWarning, match="the checkpoint has no tokenizer"):
        with_whole_tokenizers(lambda *args: None)(tokenizer, None, tmp_path)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A module on disk, importable for the length of a test."""
    name = "a_release_of_megatron"
    (tmp_path / f"{name}.py").write_text("def build():\n    return 'own'\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, name, raising=False)
    yield name
    sys.modules.pop(name, None)


def patched(monkeypatch, *patches):
    modules = PatchedModules(patches)
    monkeypatch.setattr(sys, "meta_path", [modules, *sys.meta_path])
    return modules


def test_a_module_is_patched_once_it_is_executed(package, monkeypatch):
    patched(monkeypatch, Patch(package, "build", lambda own: lambda: own() + " and ours"))
    module = import_module(package)
    assert module.build() == "own and ours"
    assert module.__spec__.loader.get_source(package).startswith("def build")


def test_names_bound_before_are_patched_wherever_they_are(package, monkeypatch):
    module = import_module(package)
    other = ModuleType("other_module")
    other.alias = module.build
    monkeypatch.setitem(sys.modules, "other_module", other)
    modules = patched(monkeypatch, Patch(package, "build", lambda own: lambda: "ours"))
    modules.patch_imported()
    assert (module.build(), other.alias()) == ("ours", "ours")


def test_a_module_that_does_not_exist_is_no_trouble(monkeypatch):
    modules = patched(monkeypatch, Patch("no_such_module", "build", lambda own: own))
    modules.patch_imported()
    with pytest.raises(ModuleNotFoundError):
        import_module("no_such_module")


def test_a_release_that_lacks_a_function_is_said_to_be_unknown(package, monkeypatch):
    patched(monkeypatch, Patch(package, "assemble", lambda own: own))
    with pytest.warns(UserWarning, match=f"{package} has no assemble: megatron-ext does not know"):
        import_module(package)


def test_a_function_of_some_releases_may_be_absent(package, monkeypatch, recwarn):
    patched(monkeypatch, Patch(package, "assemble", lambda own: own, optional=True))
    import_module(package)
    assert list(recwarn) == []


@pytest.mark.parametrize("python_path", ["", "/given"])
def test_python_path_comes_before_the_checkout_and_the_checkout_before_the_rest(
    python_path, tmp_path, monkeypatch
):
    monkeypatch.setenv("PYTHONPATH", python_path)
    folder = make_checkout(tmp_path, "main")
    given = [python_path] if python_path else []
    found = script._search_path(folder / "tools" / "x.py", ["/bin", *given, "/usr/lib", "/site"])
    assert found == [str(folder / "tools"), *given, str(folder), "/usr/lib", "/site"]


def test_a_script_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"absent\.py: the script does not exist"):
        script.run_script(tmp_path / "absent.py")
