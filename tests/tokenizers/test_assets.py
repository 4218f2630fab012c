"""A tokenizer saved to a folder and built again from it, for every library."""

import json
import multiprocessing
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    MegatronTokenizerVision,
    TokenizerConfig,
    build_tokenizer,
)
from tests.fork_server import run_python
from tests.tokenizers.published import EVERY_STRETCH, SHARED, needs_published_files
from tests.tokenizers.tokenizer_files import MAKERS

METADATA = "tokenizer_metadata.json"
TEXT = "The parser  reads\tnaïve café 🙂 <|end|> </s> [CLS] 12345\n<extra_id_0>"
WITHOUT_FILE = {
    "byte-level": ({"library": "byte-level"}, {"additional_special_tokens": ["<a>"]}),
    "byte-level-legacy": ({"library": "byte-level"}, {"legacy": True, "vocab_size": 300}),
    "null": ({"library": "null"}, {"vocab_size": 300}),
    "null-as-0.16": ({"library": "null-text"}, {"vocab_size": 30, "add_eod": True, "pad_id": 0}),
}


class OwnTokenizer(MegatronTokenizerText):
    """A user's class."""


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def rebuilt(ours: MegatronTokenizerText, folder: Path) -> MegatronTokenizerText:
    """Saved to ``folder / "saved"`` and built again from there."""
    ours.save_pretrained(folder / "saved")
    return MegatronTokenizer.from_pretrained(folder / "saved")


def assert_saved_twice_is_saved_once(ours: MegatronTokenizerText, folder: Path) -> None:
    theirs = rebuilt(ours, folder)
    assert_same(ours, theirs)
    theirs.save_pretrained(folder / "again")
    assert contents(folder / "saved") == contents(folder / "again")


def assert_same(one: MegatronTokenizerText, other: MegatronTokenizerText) -> None:
    text = TEXT
    if one.library == "null":
        text = "12 7 0 299" if one.vocab_size > 299 else "12 7 0"
    assert type(one) is type(other)
    assert one.tokenize(text) == other.tokenize(text)
    assert one.fingerprint() == other.fingerprint()
    assert one.special_tokens_dict == other.special_tokens_dict
    assert one.additional_special_tokens_ids == other.additional_special_tokens_ids
    assert one.chat_template == other.chat_template
    assert one.prompt_format == other.prompt_format
    assert one.constructor_options().keys() == other.constructor_options().keys()
    mine, its = one.unique_identifiers, other.unique_identifiers
    assert {**mine, "tokenizer_path": ""} == {**its, "tokenizer_path": ""}


@pytest.fixture
def any_tokenizer(tokenizer: Callable[[str], MegatronTokenizerText]) -> Callable[[str], object]:
    def built(name: str) -> MegatronTokenizerText:
        if name in WITHOUT_FILE:
            metadata, options = WITHOUT_FILE[name]
            return MegatronTokenizer.from_pretrained(None, metadata, **options)
        return tokenizer(name)

    return built


FILES = {
    "sentencepiece-v7": ["tokenizer.model"],
    "tekken": ["tekken.json"],
    "json-rank-list": ["tokenizer.json"],
    "rank-file": ["tokenizer.tiktoken"],
    "huggingface-nfc": ["tokenizer.json", "tokenizer_config.json"],
    "huggingface-metaspace": ["tokenizer.json"],
    "byte-level": [],
    "null": [],
}
"""What a library finds without metadata."""
SAVED = [name for name in MAKERS if EVERY_STRETCH or name != "sentencepiece-v1"]


@pytest.mark.parametrize("name", [*SAVED, *WITHOUT_FILE])
def test_every_library_is_saved_and_built_again(any_tokenizer, tmp_path, name):
    ours = any_tokenizer(name)
    assert_saved_twice_is_saved_once(ours, tmp_path)
    if name in FILES:
        assert sorted(os.listdir(tmp_path / "again")) == sorted([*FILES[name], METADATA])
    if FILES.get(name):
        (tmp_path / "again" / METADATA).unlink()
        bare = MegatronTokenizer.from_pretrained(tmp_path / "again")
        assert bare.tokenize(TEXT) == ours.tokenize(TEXT)


def test_a_folder_is_enough_wherever_it_is_moved_to(tokenizer_path, tmp_path):
    source = shutil.copytree(tokenizer_path("huggingface-nfc"), tmp_path / "source")
    ours = MegatronTokenizer.from_pretrained(source, prompt_format=None, pad_token="<|end|>")
    ours.save_pretrained(tmp_path / "saved")
    ids = ours.tokenize(TEXT)
    shutil.rmtree(source)
    moved = shutil.move(tmp_path / "saved", tmp_path / "elsewhere")
    assert str(tmp_path) not in (moved / METADATA).read_text(encoding="utf-8")
    code = (
        "import json, sys; from megatron_ext import MegatronTokenizer\n"
        "t = MegatronTokenizer.from_pretrained(sys.argv[1])\n"
        "print(json.dumps([t.tokenize(sys.argv[2]), t.pad]))"
    )
    assert json.loads(run_python(code, moved, TEXT).stdout) == [ids, ours.eos]


def test_every_option_and_the_template_come_back(tokenizer_path, tmp_path):
    ours = MegatronTokenizer.from_pretrained(
        tokenizer_path("json-rank-list"),
        num_special_tokens=20,
        pattern="v1",
        vocab_size=1500,
        chat_template="{% for m in messages %}{{ m.content }}{% endfor %}",
        parse_special_tokens=True,
        identify_by_content=True,
    )
    theirs = rebuilt(ours, tmp_path)
    assert_same(ours, theirs)
    assert theirs.parse_special_tokens
    assert theirs.identify_by_content
    assert theirs.vocab_size == 1500
    assert theirs.unique_identifiers["vocabulary"] == ours.fingerprint()


def test_a_template_that_came_with_the_tokenizer_travels_in_its_file(tokenizer_path, tmp_path):
    source = shutil.copytree(tokenizer_path("huggingface-nfc"), tmp_path / "source")
    (source / "chat_template.jinja").write_text("{{ messages[0].content }}", encoding="utf-8")
    MegatronTokenizer.from_pretrained(source).save_pretrained(tmp_path / "saved")
    saved = json.loads((tmp_path / "saved" / METADATA).read_text(encoding="utf-8"))
    assert saved["chat_template"] is None
    assert (tmp_path / "saved" / "chat_template.jinja").is_file()
    theirs = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    assert theirs.chat_template == "{{ messages[0].content }}"


@pytest.mark.parametrize("prompt_format", ["identity", "file"])
def test_the_prompt_format_comes_back_with_its_file(tokenizer_path, tmp_path, prompt_format):
    template = tmp_path / "mine.jinja"
    template.write_text(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", encoding="utf-8"
    )
    ours = MegatronTokenizer.from_pretrained(
        tokenizer_path("sentencepiece-nfkc"),
        prompt_format=f"file:{template}" if prompt_format == "file" else prompt_format,
    )
    ours.save_pretrained(tmp_path / "saved")
    template.unlink()
    theirs = MegatronTokenizer.from_pretrained(tmp_path / "saved")
    conversation = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yes"}]
    for one, other in zip(
        ours.tokenize_conversation(conversation, True, False),
        theirs.tokenize_conversation(conversation, True, False),
        strict=True,
    ):
        assert one.tolist() == other.tolist()
    assert theirs.pad == ours.pad
    theirs.save_pretrained(tmp_path / "again")
    assert contents(tmp_path / "saved") == contents(tmp_path / "again")


@pytest.mark.parametrize("name", ["huggingface-nfc", "sentencepiece-v1", "json-rank-list"])
def test_a_tokenizer_for_images_comes_back(tokenizer_path, tmp_path, name):
    ours = MegatronTokenizer.from_pretrained(
        tokenizer_path(name),
        {"library": MegatronTokenizer.from_pretrained(tokenizer_path(name)).library}
        | {"mode": "multimodal"},
        image_tag_type="nvlm",
        special_tokens=["<image>", "<tile_1>"],
    )
    theirs = rebuilt(ours, tmp_path)
    assert type(theirs) is MegatronTokenizerVision
    assert_same(ours, theirs)
    assert theirs.image_tag_type == "nvlm"
    assert theirs.token_to_id("<tile_1>") == ours.token_to_id("<tile_1>")


def test_a_null_tokenizer_for_images_comes_back(tmp_path):
    ours = MegatronTokenizer.from_pretrained(
        None, {"library": "null-multimodal"}, vocab_size=30, image_tag_type=""
    )
    theirs = rebuilt(ours, tmp_path)
    assert_same(ours, theirs)
    assert theirs.tokenize("1 <image> 2") == ours.tokenize("1 <image> 2")


def test_a_tokenizer_for_images_whose_class_alone_says_so_comes_back(tmp_path):
    ours = MegatronTokenizerVision(
        None, {"library": "byte-level"}, special_tokens=(), image_tag_type="internvl"
    )
    theirs = rebuilt(ours, tmp_path)
    assert_same(ours, theirs)
    assert theirs.image_tag_type == "internvl"


def test_a_class_of_ones_own_and_unknown_metadata_come_back(tokenizer_path, tmp_path):
    metadata = {
        "library": "huggingface",
        "class_name": "OwnTokenizer",
        "class_path": __name__,
        "model_type": "gpt",
        "note": {"kept": [1, None]},
    }
    ours = MegatronTokenizer.from_pretrained(tokenizer_path("huggingface-nfc"), metadata)
    theirs = rebuilt(ours, tmp_path)
    assert type(theirs) is OwnTokenizer
    assert theirs.config["note"] == {"kept": [1, None]}
    assert theirs.config["model_type"] == "gpt"


def test_added_special_tokens_are_saved(tokenizer_path, tmp_path):
    ours = MegatronTokenizer.from_pretrained(tokenizer_path("huggingface-nfc"))
    assert ours.add_special_tokens({"pad_token": "<pad>", "additional_special_tokens": ["<a>"]})
    theirs = rebuilt(ours, tmp_path)
    assert_same(ours, theirs)
    assert theirs.pad == theirs.token_to_id("<pad>")


def test_links_are_saved_by_what_they_point_to(tokenizer_path, tmp_path):
    # The cache of the hub holds links.
    (tmp_path / "cache").mkdir()
    for file in tokenizer_path("huggingface-nfc").iterdir():
        (tmp_path / "cache" / file.name).symlink_to(file)
    MegatronTokenizer.from_pretrained(tmp_path / "cache").save_pretrained(tmp_path / "saved")
    assert not any(file.is_symlink() for file in (tmp_path / "saved").iterdir())
    MegatronTokenizer.from_pretrained(tmp_path / "saved")


def test_a_metadata_file_alone_leads_to_its_folder(tokenizer, tmp_path):
    ours = tokenizer("sentencepiece-v1")
    ours.save_pretrained(tmp_path / "saved")
    for path in (tmp_path / "saved", None, tmp_path / "saved" / "tokenizer.model"):
        theirs = MegatronTokenizer.from_pretrained(path, tmp_path / "saved" / METADATA)
        assert theirs.fingerprint() == ours.fingerprint()
    by_file = MegatronTokenizer.from_pretrained(tmp_path / "saved" / "tokenizer.model")
    assert by_file.fingerprint() == ours.fingerprint()


def test_a_caller_may_change_what_was_saved(tokenizer, tmp_path):
    tokenizer("huggingface-nfc").save_pretrained(tmp_path / "saved")
    changed = MegatronTokenizer.from_pretrained(
        tmp_path / "saved", additional_special_tokens=["<new>"], parse_special_tokens=True
    )
    assert changed.tokenize("<new>") == [changed.token_to_id("<new>")]


@needs_published_files
@pytest.mark.parametrize(
    "name",
    [
        "bert_uncased",
        *(["gpt2", "t5_small", "llama2_sp/tokenizer.model"] if EVERY_STRETCH else []),
        "sp_tiny/kyoto_ja_unigram_8000.model",
        "openai_tiktoken/p50k_base.tiktoken",
    ],
)
def test_published_tokenizers_are_saved_and_built_again(tmp_path, name):
    ours = MegatronTokenizer.from_pretrained(SHARED / "tokenizers" / name)
    assert_saved_twice_is_saved_once(ours, tmp_path)


# What Megatron's own save_tokenizer_assets writes: the file alone.


@pytest.mark.parametrize(
    ("name", "file"),
    [
        ("sentencepiece-v3", "tokenizer.model"),
        ("json-rank-list", "tokenizer.json"),
        ("huggingface-metaspace", "tokenizer.json"),
    ],
)
def test_folders_that_megatron_wrote_are_read(tokenizer_path, tokenizer, tmp_path, name, file):
    path = tokenizer_path(name)
    shutil.copy2(path / file if path.is_dir() else path, tmp_path / file)
    assert_same(tokenizer(name), MegatronTokenizer.from_pretrained(tmp_path))


def test_vocabulary_files_that_megatron_wrote_are_read(tokenizer_path, tokenizer, tmp_path):
    bpe, word_piece = tmp_path / "bpe", tmp_path / "word_piece"
    for folder, name in ((bpe, "huggingface-byte-level"), (word_piece, "huggingface-wordpiece")):
        folder.mkdir()
        text = (tokenizer_path(name) / "tokenizer.json").read_text(encoding="utf-8")
        model = json.loads(text)["model"]
        if folder is bpe:
            merges = "".join(f"{left} {right}\n" for left, right in model["merges"])
            (folder / "merges.txt").write_text(merges, encoding="utf-8")
            (folder / "vocab.json").write_text(json.dumps(model["vocab"]), encoding="utf-8")
        else:
            pieces = sorted(model["vocab"], key=model["vocab"].__getitem__)
            (folder / "vocab.txt").write_text("\n".join(pieces) + "\n", encoding="utf-8")
        theirs = MegatronTokenizer.from_pretrained(folder)
        assert theirs.tokenize("the parser") == tokenizer(name).tokenize("the parser")
        by_config = build_tokenizer(TokenizerConfig(model=str(folder)))
        assert by_config.fingerprint() == theirs.fingerprint()
        theirs.save_pretrained(tmp_path / "saved" / folder.name)
        assert_same(theirs, MegatronTokenizer.from_pretrained(tmp_path / "saved" / folder.name))


def test_a_folder_without_a_tokenizer_is_named(tmp_path):
    # Megatron makes it for its null tokenizer and writes nothing.
    with pytest.raises(TokenizerError, match=rf"{tmp_path.name}: the directory holds no tokenizer"):
        MegatronTokenizer.from_pretrained(tmp_path)


# Damage.


@pytest.fixture
def saved(tokenizer, tmp_path):
    tokenizer("huggingface-nfc").save_pretrained(tmp_path / "saved")
    return tmp_path / "saved"


def edit_metadata(folder: Path, edit: Callable[[dict], None]) -> None:
    document = json.loads((folder / METADATA).read_text(encoding="utf-8"))
    edit(document)
    (folder / METADATA).write_text(json.dumps(document), encoding="utf-8")


def test_a_missing_file_is_named(saved):
    (saved / "tokenizer_config.json").unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json: .*missing.*expected \d+ by"):
        MegatronTokenizer.from_pretrained(saved)


def test_a_truncated_file_is_named_with_both_sizes(saved):
    size = os.path.getsize(saved / "tokenizer.json")
    os.truncate(saved / "tokenizer.json", size - 10)
    message = rf"tokenizer\.json: the file differs.*got {size - 10} bytes.*expected {size} bytes"
    with pytest.raises(TokenizerError, match=message):
        MegatronTokenizer.from_pretrained(saved)


def test_an_altered_file_is_named_with_both_hashes(saved):
    file = saved / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"<|end|>", b"<|fin|>"))
    with pytest.raises(TokenizerError, match=r"got .* SHA-256 \w{64}; expected .*\w{64}"):
        MegatronTokenizer.from_pretrained(saved)


def test_a_file_that_was_not_saved_and_would_be_read_is_refused(saved):
    (saved / "chat_template.jinja").write_text("{{ messages }}", encoding="utf-8")
    with pytest.raises(TokenizerError, match=r"its files differ; got .*chat_template\.jinja"):
        MegatronTokenizer.from_pretrained(saved)
    (saved / "chat_template.jinja").unlink()
    (saved / "README.md").touch()
    MegatronTokenizer.from_pretrained(saved)


def test_a_vocabulary_that_differs_from_its_fingerprint_is_refused(saved):
    edit_metadata(saved, lambda document: document["assets"].update(fingerprint="0" * 64))
    with pytest.raises(TokenizerError, match=r"fingerprint of the vocabulary.*expected 0{64}"):
        MegatronTokenizer.from_pretrained(saved)


def test_special_tokens_that_differ_are_refused(saved):
    edit_metadata(saved, lambda document: document["assets"]["special_tokens"].clear())
    with pytest.raises(TokenizerError, match=r"special tokens differ; got \{'eos_token'"):
        MegatronTokenizer.from_pretrained(saved)


def test_assets_of_a_newer_release_are_refused(saved):
    edit_metadata(saved, lambda document: document["assets"].update(version=2))
    with pytest.raises(TokenizerError, match=r"got version 2 .*expected at most 1; upgrade"):
        MegatronTokenizer.from_pretrained(saved)


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document["assets"].pop("files"),
        lambda document: document.update(assets=[]),
        lambda document: document["assets"].update(version="1"),
        lambda document: document["assets"].update(files={"../../etc/hosts": {}}),
        lambda document: document["assets"].update(option_files={"vocab_file": "/etc/hosts"}),
    ],
    ids=["no-files", "list", "version", "path", "option-path"],
)
def test_a_malformed_record_is_refused(saved, edit):
    edit_metadata(saved, edit)
    with pytest.raises(TokenizerError, match=rf"{METADATA}: the record .* is malformed"):
        MegatronTokenizer.from_pretrained(saved)


def test_metadata_cut_short_are_refused(saved):
    os.truncate(saved / METADATA, 100)
    with pytest.raises(TokenizerError, match=r"tokenizer_metadata\.json: .*not valid JSON"):
        MegatronTokenizer.from_pretrained(saved)


# Writing.


def test_a_folder_that_holds_something_is_refused(saved, tokenizer):
    before = contents(saved)
    with pytest.raises(TokenizerError, match="not empty; name another folder, or pass overwrite"):
        tokenizer("sentencepiece-nfkc").save_pretrained(saved)
    assert contents(saved) == before


def test_a_saved_tokenizer_is_replaced_on_request(saved, tokenizer):
    tokenizer("sentencepiece-nfkc").save_pretrained(saved, overwrite=True)
    assert sorted(contents(saved)) == ["tokenizer.model", METADATA]
    assert os.listdir(saved.parent) == ["saved"]


def test_a_folder_with_other_files_is_never_replaced(saved, tokenizer):
    (saved / "model.safetensors").write_bytes(b"weights")
    with pytest.raises(TokenizerError, match="not empty"):
        tokenizer("sentencepiece-nfkc").save_pretrained(saved, overwrite=True)
    assert (saved / "model.safetensors").read_bytes() == b"weights"


def test_saving_the_same_tokenizer_again_does_nothing(saved, tokenizer):
    # A run that is resumed saves the same iteration again.
    before = {file.name: file.stat().st_mtime_ns for file in saved.iterdir()}
    tokenizer("huggingface-nfc").save_pretrained(saved)
    assert {file.name: file.stat().st_mtime_ns for file in saved.iterdir()} == before


def test_ranks_that_save_the_same_tokenizer_at_once_all_succeed(tokenizer, tmp_path):
    context = multiprocessing.get_context("fork")
    ours = tokenizer("huggingface-metaspace")
    ranks = [
        context.Process(target=ours.save_pretrained, args=(tmp_path / "saved",)) for _ in range(4)
    ]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(timeout=30)
    assert [rank.exitcode for rank in ranks] == [0] * 4
    assert os.listdir(tmp_path) == ["saved"]
    MegatronTokenizer.from_pretrained(tmp_path / "saved")


def test_an_empty_folder_is_taken_over(tokenizer, tmp_path):
    # Megatron makes the folder before it asks the tokenizer to save itself there.
    tokenizer("sentencepiece-v1").save_pretrained(tmp_path)
    MegatronTokenizer.from_pretrained(tmp_path)


def test_a_file_in_the_place_of_the_folder_is_refused(tokenizer, tmp_path):
    (tmp_path / "taken").touch()
    with pytest.raises(TokenizerError, match="taken: a file is in the place"):
        tokenizer("sentencepiece-nfkc").save_pretrained(tmp_path / "taken", overwrite=True)
    with pytest.raises(TokenizerError, match="taken"):
        tokenizer("sentencepiece-nfkc").save_pretrained(tmp_path / "taken" / "saved")


def test_a_write_that_fails_leaves_nothing(tokenizer, tmp_path, fill_disk):
    fill_disk()
    with pytest.raises(TokenizerError, match="cannot write the folder; got No space left"):
        tokenizer("sentencepiece-v1").save_pretrained(tmp_path / "saved")
    assert os.listdir(tmp_path) == []


def test_a_file_that_changed_since_it_was_read_is_not_saved(tokenizer_path, tmp_path):
    source = shutil.copytree(tokenizer_path("huggingface-nfc"), tmp_path / "source")
    ours = MegatronTokenizer.from_pretrained(source)
    file = source / "tokenizer.json"
    file.write_bytes(file.read_bytes().replace(b"<|end|>", b"<|fin|>"))
    with pytest.raises(TokenizerError, match="not the one that was saved"):
        ours.save_pretrained(tmp_path / "saved")
    file.unlink()
    with pytest.raises(TokenizerError, match=r"tokenizer\.json: cannot read a file of the tok"):
        ours.save_pretrained(tmp_path / "saved")
    assert os.listdir(tmp_path) == ["source"]


def test_an_option_that_json_cannot_hold_is_named(tmp_path):
    ours = MegatronTokenizer.from_pretrained(
        metadata_path={"library": "byte-level"}, special_tokens={"<a>"}
    )
    with pytest.raises(TokenizerError, match=r"special_tokens: .*cannot be saved.*got set"):
        ours.save_pretrained(tmp_path / "saved")


def save_in_turns(tokenizers, folder, stop):
    while not stop.is_set():
        for tokenizer in tokenizers:
            tokenizer.save_pretrained(folder, overwrite=True)


def test_readers_get_one_of_two_tokenizers_or_an_error_while_one_replaces_the_other(
    tokenizer, tmp_path
):
    # Both are built in milliseconds, so that a reader is done before the next one is there.
    both = [tokenizer("sentencepiece-nfkc"), tokenizer("huggingface-nfc")]
    folder = tmp_path / "saved"
    context = multiprocessing.get_context("fork")
    stop = context.Event()
    writer = context.Process(target=save_in_turns, args=(both, folder, stop))
    writer.start()
    expected = {one.fingerprint() for one in both}
    seen, reads, deadline = set(), 0, time.monotonic() + 60
    try:
        while seen != expected or reads < 100:
            assert time.monotonic() < deadline
            reads += 1
            try:
                seen.add(MegatronTokenizer.from_pretrained(folder).fingerprint())
            except TokenizerError:
                # The folder was taken away while it was read.
                continue
            assert seen <= expected
    finally:
        stop.set()
        writer.join(timeout=30)
    assert writer.exitcode == 0
    assert os.listdir(tmp_path) == ["saved"]


def test_the_configuration_finds_a_saved_folder(tokenizer, tmp_path):
    ours = MegatronTokenizer.from_pretrained(
        tokenizer("huggingface-nfc").path, additional_special_tokens=["<a>"]
    )
    ours.save_pretrained(tmp_path / "saved")
    theirs = build_tokenizer(TokenizerConfig(model=str(tmp_path / "saved")))
    assert theirs.fingerprint() == ours.fingerprint()


@pytest.mark.parametrize("key", ["chat_template", "prompt_format", "config"])
@pytest.mark.parametrize("leaves", [True, False], ids=["outside", "inside"])
def test_a_template_that_a_tokenizer_names_is_read_in_its_folder_alone(
    tokenizer_path, tmp_path, key, leaves
):
    folder = tmp_path / "tokenizer"
    shutil.copytree(tokenizer_path("huggingface-byte-level"), folder)
    source = "{% for m in messages %}{{ m.content }}{% endfor %}"
    (tmp_path / "secret.jinja").write_text(source, encoding="utf-8")
    (folder / "own.jinja").write_text(source, encoding="utf-8")
    for name in ("../secret.jinja", str(tmp_path / "secret.jinja")) if leaves else ("own.jinja",):
        if key == "config":
            file, values = folder / "tokenizer_config.json", {"chat_template": name}
        else:
            file = folder / METADATA
            named = name if key == "chat_template" else f"file:{name}"
            values = {"library": "huggingface", key: named}
        file.write_text(json.dumps(values), encoding="utf-8")
        if leaves:
            with pytest.raises(
                TokenizerError, match="names a template outside its folder"
            ) as raised:
                build_tokenizer(TokenizerConfig(model=str(folder)))
            assert str(raised.value).startswith(str(file))
            continue
        tokenizer = build_tokenizer(TokenizerConfig(model=str(folder)))
        if key == "prompt_format":
            assert tokenizer.prompt_config.custom_chat_template == source
        else:
            assert tokenizer.chat_template == source
