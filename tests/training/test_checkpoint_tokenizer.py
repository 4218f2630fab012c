"""A model is given the tokenizer that it was trained with, or nothing starts."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoTokenizer

from megatron_ext.errors import CheckpointError
from megatron_ext.evaluation.megatron_language_model import ModelOptions, open_model
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.checkpoints.huggingface_import import import_huggingface
from megatron_ext.training.checkpoints.tokenizer import (
    KeptTokenizer,
    check_same_tokenizer,
    row_misfit,
    tokenizer_doubts,
)
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.yaml_file import with_huggingface_models
from megatron_ext.training.dry_run import dry_run
from megatron_ext.training.inputs import read_inputs, read_served_teacher
from megatron_ext.training.run_plan import TeacherPlan
from megatron_ext.typed_mapping import build_config
from tests.examples.published_models import write_hollow_weights
from tests.tokenizers.tokenizer_files import rank_file
from tests.training.tiny_run import changed

BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())
ANOTHER = "the model was trained with another tokenizer"
SIZES = {
    "num_hidden_layers": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_attention_heads": 1,
    "rms_norm_eps": 1e-6,
    "initializer_range": 0.02,
    "tie_word_embeddings": True,
    "max_position_embeddings": 64,
}


def write_tokenizer(folder, *, letters=BYTES, specials=("<eos>",)):
    """An id for each byte, in an order, and special tokens behind them."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(specials))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": specials[0]}))
    return folder


def write_model(folder, *, rows, **tokenizer):
    """A folder of a Llama with nothing but the headers of its weights."""
    write_tokenizer(folder, **tokenizer)
    config = {**SIZES, "architectures": ["LlamaForCausalLM"], "vocab_size": rows}
    (folder / "config.json").write_text(json.dumps(config))
    layer = "model.layers.0"
    square = ("q_proj", "k_proj", "v_proj", "o_proj")
    shapes = {
        "model.embed_tokens.weight": (rows, 8),
        "model.norm.weight": (8,),
        f"{layer}.input_layernorm.weight": (8,),
        f"{layer}.post_attention_layernorm.weight": (8,),
        **{f"{layer}.self_attn.{name}.weight": (8, 8) for name in square},
        **{f"{layer}.mlp.{name}_proj.weight": (8, 8) for name in ("gate", "up", "down")},
    }
    write_hollow_weights(folder, shapes)
    return folder


def doubts(checkpoint, tokenizer, *, allow_other=False):
    return tokenizer_doubts(
        checkpoint, _read(tokenizer), allow_other=allow_other, switch="pass --it"
    )


def _read(tokenizer):
    return build_tokenizer(TokenizerConfig(model=str(tokenizer)))


def write_checkpoint(folder, tokenizer, *, keeps):
    folder.mkdir()
    torch.save({"run": {"tokenizer_fingerprint": tokenizer.fingerprint()}}, folder / "common.pt")
    if keeps:
        tokenizer.save_pretrained(folder / "tokenizer")
    return folder


def test_the_folders_own_tokenizer_fits_and_so_does_a_copy(tmp_path):
    model = write_model(tmp_path / "model", rows=300)
    assert doubts(model, model) == []
    assert doubts(model, model / "tokenizer.json") == []
    assert doubts(model, write_tokenizer(tmp_path / "copy")) == []


def test_ids_that_mean_something_else_are_refused_unless_they_are_allowed(tmp_path):
    model = write_model(tmp_path / "model", rows=300)
    other = write_tokenizer(tmp_path / "other", letters=BYTES[::-1])
    with pytest.raises(CheckpointError) as refused:
        doubts(model, other)
    line = str(refused.value)
    assert line.startswith(f"{model}: {ANOTHER}; got {other}: 256 of 257 ids mean something els")
    assert line.endswith("or pass --it if another one is meant")
    (doubt,) = doubts(model, other, allow_other=True)
    assert "another tokenizer than the model's is allowed: 256 of 257 ids" in doubt


@pytest.mark.parametrize("has_own", [True, False], ids=["own", "none"])
def test_many_more_ids_than_rows_are_refused(tmp_path, has_own):
    model = write_model(tmp_path / "model", rows=100)
    tokenizer = write_tokenizer(tmp_path / "given")
    if not has_own:
        _without_tokenizer(model)
    with pytest.raises(CheckpointError, match=f"{ANOTHER}.* 257 ids for a model with 100 rows"):
        doubts(model, tokenizer)


def test_a_few_ids_without_a_row_are_a_doubt(tmp_path):
    # Gemma 3 1B: 262,145 ids and 262,144 rows.
    model = write_model(tmp_path / "model", rows=256)
    (doubt,) = doubts(model, model)
    assert doubt.endswith("no rows for the last 1 ids: theirs are zero")


@pytest.mark.parametrize("has_own", [True, False], ids=["own", "none"])
def test_many_more_rows_than_ids_are_refused_unless_they_are_allowed(tmp_path, has_own):
    model = write_model(tmp_path / "model", rows=5000)
    tokenizer = write_tokenizer(tmp_path / "given")
    if not has_own:
        _without_tokenizer(model)
    with pytest.raises(CheckpointError, match=f"{ANOTHER}.* with 5,000 rows, of which 4,743 are"):
        doubts(model, tokenizer)
    assert "padding explains 1,024 at most" in doubts(model, tokenizer, allow_other=True)[0]


PUBLISHED = {
    "BLOOM": (250_680, 250_880),
    "Command R": (255_029, 256_000),
    "DeepSeekMoE 16B": (100_015, 102_400),
    "Gemma 3 1B": (262_145, 262_144),
    "Gemma 3 4B": (262_145, 262_208),
    "GPT-J": (50_257, 50_400),
    "gpt-oss": (200_019, 201_088),
    "Llama 3": (128_256, 128_256),
    "Phi-4-mini": (200_029, 200_064),
    "Pythia 12B": (50_277, 50_688),
    "Qwen2.5 7B": (151_665, 152_064),
    "Qwen3": (151_669, 151_936),
}
"""Ids of published tokenizers and rows of their models."""


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_models_rows_are_those_of_its_tokenizer(name):
    assert row_misfit(*PUBLISHED[name]) is None


@pytest.mark.parametrize(
    ("ids", "rows"),
    [
        (151_669, 3_072),
        (50_257, 151_936),
        # Llama 3's ids on Mistral NeMo's rows.
        (128_256, 131_072),
        (131_072, 128_256),
        (3_072, 5_000),
    ],
)
def test_another_tokenizer_is_told_by_rows_that_padding_does_not_explain(ids, rows):
    assert f"{ids:,} ids for a model with {rows:,} rows" in row_misfit(ids, rows)


@pytest.mark.parametrize(
    ("specials", "words"),
    [
        (("<eos>", "<tool>"), "has 258 ids, and the checkpoint's own 257"),
        (("<|im_end|>",), "1 control tokens have other names"),
    ],
    ids=["added", "renamed"],
)
def test_added_and_renamed_control_tokens_are_a_doubt(tmp_path, specials, words):
    model = write_model(tmp_path / "model", rows=300)
    (doubt,) = doubts(model, write_tokenizer(tmp_path / "given", specials=specials))
    assert words in doubt


def test_what_cannot_be_compared_is_said(tmp_path):
    model = write_model(tmp_path / "model", rows=300)
    tokenizer = write_tokenizer(tmp_path / "given")
    (model / "tokenizer.json").write_text("{}")
    (unreadable,) = doubts(model, tokenizer)
    assert unreadable.startswith("the checkpoint's own tokenizer cannot be read")
    _without_tokenizer(model)
    (none,) = doubts(model, tokenizer)
    assert none.startswith("no tokenizer comes with the checkpoint: whether the model was trained")
    assert none.endswith("with this one is not known")


def _without_tokenizer(folder):
    for file in folder.glob("tokenizer*"):
        file.unlink()


@pytest.mark.parametrize("library", ["byte-level", "tiktoken"])
def test_a_tokenizer_of_any_library_that_was_saved_in_a_folder_is_its_own(tmp_path, library):
    file = None if library == "byte-level" else str(rank_file(tmp_path))
    tokenizer = build_tokenizer(TokenizerConfig(library=library, model=file))
    model, checkpoint = write_model(tmp_path / "model", rows=tokenizer.vocab_size), tmp_path / "run"
    _without_tokenizer(model)
    tokenizer.save_pretrained(checkpoint / "tokenizer")
    shutil.copytree(checkpoint / "tokenizer", model, dirs_exist_ok=True)
    assert doubts(model, model) == []
    filled = with_huggingface_models({"initial_checkpoint": str(model)})
    assert filled["tokenizer"] == {"model": str(model)}
    shutil.copytree(model, checkpoint / "huggingface")
    assert KeptTokenizer(checkpoint).is_of_huggingface
    # Where it is not, an export has all that our own reader needs.
    (tmp_path / "exported").mkdir()
    for name, content in KeptTokenizer(checkpoint).files().items():
        (tmp_path / "exported" / name).write_bytes(content)
    assert _read(tmp_path / "exported").fingerprint() == tokenizer.fingerprint()


@pytest.mark.parametrize("chosen", [None, "rag"])
def test_transformers_finds_every_template_of_an_exported_tokenizer(tmp_path, chosen):
    templates = {"default": "{{ 1 }}", "rag": "{{ 2 }}"}
    write_tokenizer(tmp_path / "own")
    theirs = AutoTokenizer.from_pretrained(tmp_path / "own")
    theirs.chat_template = templates
    for is_list in (False, True):
        own, checkpoint = tmp_path / f"own {is_list}", tmp_path / f"checkpoint {is_list}"
        theirs.save_pretrained(own, save_jinja_files=not is_list)
        config = TokenizerConfig(model=str(own), chat_template=chosen)
        build_tokenizer(config).save_pretrained(checkpoint / "tokenizer")
        for name, content in KeptTokenizer(checkpoint).files().items():
            place = checkpoint / "exported" / name
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(content)
        exported = AutoTokenizer.from_pretrained(checkpoint / "exported")
        assert exported.chat_template == (templates if chosen is None else templates[chosen])


@pytest.mark.parametrize("keeps", [True, False], ids=["tokenizer", "fingerprint"])
def test_a_checkpoint_of_ours_says_which_tokenizer_it_was_saved_with(tmp_path, keeps):
    own, other = (
        write_tokenizer(tmp_path / name, letters=letters)
        for name, letters in (("own", BYTES), ("other", BYTES[::-1]))
    )
    checkpoint = write_checkpoint(tmp_path / "iter_0000001", _read(own), keeps=keeps)
    assert doubts(checkpoint, own) == []
    check_same_tokenizer(checkpoint, _read(own))
    with pytest.raises(CheckpointError, match="mean something else" if keeps else "vocabulary"):
        doubts(checkpoint, other)
    assert len(doubts(checkpoint, other, allow_other=True)) == 1
    longer = write_tokenizer(tmp_path / "longer", specials=("<eos>", "<tool>"))
    with pytest.raises(CheckpointError, match=ANOTHER):
        # A run that goes on has as many ids as before.
        check_same_tokenizer(checkpoint, _read(longer))
    if keeps:
        assert len(doubts(checkpoint, longer)) == 1


@pytest.mark.parametrize("is_import", [True, False], ids=["import", "run"])
def test_an_import_has_the_rows_of_its_folder(tmp_path, is_import):
    own = _read(write_tokenizer(tmp_path / "own"))
    config = {"student": {"vocab_size": 100}} | ({} if is_import else {"training": {}})
    run = {"tokenizer_fingerprint": own.fingerprint(), "config": config}
    torch.save({"run": run}, tmp_path / "common.pt")
    if is_import:
        with pytest.raises(CheckpointError, match=f"{ANOTHER}.* 257 ids for a model with 100 rows"):
            doubts(tmp_path, tmp_path / "own")
    else:
        # A run's models have a row for each id, whatever the least number.
        assert doubts(tmp_path, tmp_path / "own") == []


def test_a_folder_with_another_models_tokenizer_is_not_imported(tmp_path):
    model = write_model(tmp_path / "model", rows=100)
    words = "the tokenizer in the folder is another model's; got 257 ids for a model with 100 rows"
    with pytest.raises(CheckpointError, match=words):
        import_huggingface(model, tmp_path / "imported")
    assert not (tmp_path / "imported").exists()


def test_a_checkpoint_that_does_not_say_is_a_doubt(tmp_path):
    torch.save({}, tmp_path / "common.pt")
    tokenizer = write_tokenizer(tmp_path / "given")
    check_same_tokenizer(tmp_path, _read(tokenizer))
    (doubt,) = doubts(tmp_path, tokenizer)
    assert "is not known" in doubt


@pytest.fixture
def run(tmp_path):
    """A student and a teacher from folders, each with the tokenizer of its own."""
    (tmp_path / "text.jsonl").write_text('{"text": "some words and then some"}\n' * 4)
    folders = [write_model(tmp_path / name, rows=300) for name in ("student", "teacher")]
    write_tokenizer(folders[1], letters=BYTES[::-1])
    values = {
        "run_dir": str(tmp_path / "run"),
        "initial_checkpoint": str(folders[0]),
        "student": {"seq_length": 32},
        "teacher": {"checkpoint": str(folders[1]), "model": {"seq_length": 32}},
        "data": {"train": [str(tmp_path / "text.jsonl")]},
        "loss": {"objective": "alm"},
        "training": {"train_iters": 1, "global_batch_size": 1},
    }
    return build_config(DistillConfig, with_huggingface_models(values), ".".join)


@pytest.mark.parametrize("library", ["megatron", "huggingface"])
def test_a_dry_run_refuses_another_tokenizer_of_a_teacher(run, library):
    run = changed(run, teacher={"library": library})
    page = dry_run(run, world_size=1)
    assert page.count("model and tokenizer fit") == 2
    assert "warning" not in page
    specials = [f"<{i}>" for i in range(150)]
    many = write_tokenizer(Path(run.run_dir).parent / "many", specials=specials)
    for other in (run.tokenizer, TokenizerConfig(model=str(many))):
        wrong = changed(run, teacher={"tokenizer": other})
        with pytest.raises(CheckpointError, match=r"set teacher\.allow_other_tokenizer if"):
            dry_run(wrong, world_size=1)
        page = dry_run(changed(wrong, teacher={"allow_other_tokenizer": True}), world_size=1)
        assert f"checkpoint  {run.teacher.checkpoint}: the model fits\n" in page
        assert f"warning     {run.teacher.checkpoint}: another tokenizer than the model's" in page


STARTS = {
    "distill and cache-teacher": lambda run: read_inputs(run, world_size=1),
    "distill --dry-run": lambda run: dry_run(run, world_size=1),
    "serve-teacher": lambda run: read_served_teacher(TeacherPlan.of(run, "teacher")),
    "evaluate and generate": lambda run: open_model(Path(run.teacher.checkpoint), ModelOptions()),
}


@pytest.mark.parametrize("rows", [100, 5000], ids=["too few rows", "too many rows"])
@pytest.mark.parametrize("start", STARTS)
def test_nothing_starts_on_a_folder_with_another_models_tokenizer(run, start, rows):
    write_model(Path(run.teacher.checkpoint), rows=rows, letters=BYTES[::-1])
    words = f"teacher: {ANOTHER}.* 257 ids for a model with {rows:,} rows"
    with pytest.raises(CheckpointError, match=words):
        STARTS[start](run)


def test_a_dry_run_refuses_another_tokenizer_of_the_student(run):
    wrong = changed(run, tokenizer=run.teacher.tokenizer)
    with pytest.raises(CheckpointError, match="or set allow_other_tokenizer if"):
        dry_run(wrong, world_size=1)
    page = dry_run(changed(wrong, allow_other_tokenizer=True), world_size=1)
    assert f"warning     {run.initial_checkpoint}: another tokenizer" in page


def test_rows_that_are_longer_than_a_folders_model_reads_are_a_doubt(run):
    assert not any(read_inputs(run, world_size=1).doubts.values())
    longer = {"seq_length": SIZES["max_position_embeddings"] + 1}
    run = changed(run, student=longer, teacher={"model": longer})
    for folder, found in read_inputs(run, world_size=1).doubts.items():
        words = "rows of 65 tokens (seq_length) are longer than the 64 that the model reads"
        assert words in "".join(found), folder
    assert dry_run(run, world_size=1).count(words) == 2
