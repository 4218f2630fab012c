"""A student learns the same from an imported recording as from our own of the same teacher."""

import json
import math
import shutil
from itertools import pairwise

import pytest
import torch
import yaml

from megatron_ext.cli.main import main
from megatron_ext.distributed.vocab_parallel import VocabShard
from megatron_ext.teachers.formed_targets import from_records
from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.inputs import read_inputs
from megatron_ext.training.teachers.block_recorder import blocks_of
from megatron_ext.training.teachers.cached_teacher import CachedTeacher
from megatron_ext.training.teachers.target_cache import TargetCache
from tests.cli.run_files import refusal
from tests.huggingface.tiny_models import save_model, save_tokenizer
from tests.process_group import run_ranks
from tests.training.cached_teacher_runs import read_values
from tests.training.teachers.imported_runs import TOP_K, record_and_train, run_values, write_run
from tests.training.teachers.recorded_elsewhere import (
    TEXTS,
    batch_line,
    capture_row,
    ids_of,
    log_probs_of,
    prompt_logprobs,
    request_output,
    write_lines,
)

# fp32 sums in another order.
TOLERANCE = 1e-5


class Recorded:
    """The teacher's ids and predictions of the texts, by plain torch."""

    def __init__(self, root):
        self.vocab_size = build_tokenizer(TokenizerConfig(model=str(root / "teacher"))).vocab_size
        self.ids = ids_of(root / "teacher")
        self.log_probs = log_probs_of(root / "teacher", self.ids, self.vocab_size)

    def vllm(self, write=request_output, top_k=TOP_K):
        """A record of each text."""
        pairs = zip(self.ids, self.log_probs, strict=True)
        return [write(ids, prompt_logprobs(ids, rows, top_k)) for ids, rows in pairs]

    def capture(self, folder, *, pad, rows_a_file=4):
        """Parquet files of DistillKit, the last id of each text replaced by its padding."""
        from pyarrow import Table, parquet

        folder.mkdir()
        pairs = zip(self.ids, self.log_probs, strict=True)
        rows = [
            capture_row([*ids[:-1], pad], log_probs, TOP_K, self.vocab_size)
            for ids, log_probs in pairs
        ]
        for first in range(0, len(rows), rows_a_file):
            table = Table.from_pylist(rows[first : first + rows_a_file])
            parquet.write_table(table, folder / f"data_{first // rows_a_file}.parquet")
        config = {"d": self.vocab_size, "k": TOP_K, "exact_k": TOP_K, "residual_bins": []}
        config |= {"delta_encoding": False, "exact_dtype": "float32"}
        (folder / "compression_config.yaml").write_text(yaml.safe_dump(config))
        return folder


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("imported")
    save_model("qwen2", root / "teacher")
    save_model("llama", root / "student")
    shutil.copytree(root / "teacher", root / "weights")
    # Several tokens of the teacher to one of the student, whose probabilities are multiplied.
    save_tokenizer(root / "teacher", text="ther other oft thenth eth e re")
    write_lines(root / "train.jsonl", [{"text": text} for text in TEXTS])
    return root


@pytest.fixture(scope="module")
def recorded(root):
    return Recorded(root)


def imported(root, cache, *words, objective="partition_kl", **data):
    """Import into ``root / cache``."""
    config = write_run(root, f"import-{cache}", objective=objective, **data)
    words = ("--config", config, "--output", root / cache, *words, "--target-precision", "fp32")
    main(["cache-teacher", *map(str, words)])


@pytest.fixture(scope="module")
def metrics(root, recorded):
    half = len(TEXTS) // 2
    records = [*recorded.vllm()[:half], *recorded.vllm(batch_line)[half:]]
    write_lines(root / "answers.jsonl", records)
    imported(root, "vllm", "--import", "vllm", root / "answers.jsonl", "--file-mib", "0.02")
    captures = recorded.capture(root / "captures", pad=0)
    imported(root, "distillkit", "--import", "distillkit", captures, objective="strict_topk")
    runs = {
        f"{objective}-{cache}": (objective, cache)
        for objective, cache in (
            ("partition_kl", "own"),
            ("strict_topk", "own"),
            ("partition_kl", "vllm"),
            ("strict_topk", "vllm"),
            ("strict_topk", "distillkit"),
            ("partition_kl", "distillkit"),
        )
    }
    return run_ranks(1, record_and_train, root, runs)[0]


@pytest.mark.parametrize(
    "name", ["partition_kl-vllm", "strict_topk-vllm", "strict_topk-distillkit"]
)
def test_losses_are_those_of_our_own_recording(name, metrics):
    objective, _, _ = name.rpartition("-")
    for found, own in zip(metrics[name], metrics[f"{objective}-own"], strict=True):
        assert found["compared"] == own["compared"] > 0
        assert found["loss"] == pytest.approx(own["loss"], rel=TOLERANCE)
        assert found["kd"] == pytest.approx(own["kd"], rel=TOLERANCE)
        assert found["grad_norm"] == pytest.approx(own["grad_norm"], rel=1e-4)


def test_chunks_with_a_label_of_unknown_probability_are_left_out(metrics):
    found, own = metrics["partition_kl-distillkit"][0], metrics["partition_kl-own"][0]
    assert found["kd"] > 1.5 * own["kd"], "unlikely texts of several tokens have small divergences"
    assert found["loss"] < own["loss"]
    assert math.isfinite(found["grad_norm"])


@pytest.mark.parametrize("cache", ["vllm", "distillkit"])
def test_targets_are_those_of_our_own_recording(cache, root, metrics):
    own, other = TargetCache(root / "own"), TargetCache(root / cache)
    assert {key.tobytes() for key in own._keys} == {key.tobytes() for key in other._keys}
    for key, length in zip(own._keys, own._tokens.tolist(), strict=True):
        expected, found = (
            from_records(its.records(key.tobytes(), length), its.form) for its in (own, other)
        )
        assert torch.equal(found["topk_ids"], expected["topk_ids"])
        for name in ("topk_logits", "log_normaliser"):
            torch.testing.assert_close(found[name], expected[name], rtol=1e-5, atol=2e-5)
        labels, known = found["label_log_probs"], ~found["label_log_probs"].isnan()
        torch.testing.assert_close(
            labels[known], expected["label_log_probs"][known], rtol=1e-5, atol=2e-5
        )
        assert known.all() or cache == "distillkit"


def test_an_import_goes_on_and_says_what_it_is_of(root, metrics, capsys):
    said = json.loads((root / "vllm" / "cache.json").read_text())
    assert said["is_complete"]
    assert said["imported"]["format"] == "vllm"
    assert len(said["shards"]) > 2
    kept = root / "vllm" / said["shards"][0]
    before = kept.stat().st_mtime_ns
    (root / "vllm" / said["shards"][-1]).unlink()
    imported(root, "vllm", "--import", "vllm", root / "answers.jsonl", "--file-mib", "0.02")
    assert kept.stat().st_mtime_ns == before
    assert json.loads((root / "vllm" / "cache.json").read_text())["is_complete"]
    assert "imported from vllm, tail exact:" in capsys.readouterr().out


def test_a_packed_capture_is_taken_apart(root, recorded, capsys):
    import pyarrow

    captures = root / "packed-of"
    recorded.capture(captures, pad=0)
    rows = [
        capture_row(ids, log_probs, TOP_K, recorded.vocab_size)
        for ids, log_probs in zip(recorded.ids, recorded.log_probs, strict=True)
    ]
    # As pack_logits does: ids without a prediction are cut off, texts put behind one another.
    packed = []
    for one, other in zip(rows[::2], [*rows[1::2], rows[0]], strict=True):
        row = {key: [*one[key], *other[key]] for key in one}
        row["input_ids"] = [*one["input_ids"][:-1], *other["input_ids"][:-1]]
        row["attention_mask"] = [1] * len(one["compressed_logprobs"])
        row["attention_mask"] += [2] * len(other["compressed_logprobs"])
        packed.append(row)
    table = pyarrow.Table.from_pylist(packed)
    with pyarrow.ipc.new_stream(str(root / "packed.arrow"), table.schema) as writer:
        writer.write_table(table)
    words = ("--import", "distillkit", root / "packed.arrow")
    words += ("--compression-config", captures / "compression_config.yaml")
    imported(root, "packed", *words, objective="strict_topk")
    windows = len({tuple(ids) for ids in recorded.ids})
    assert f"imported from distillkit, tail exact: {windows} windows" in capsys.readouterr().out


def write_conversations(root):
    """Texts as questions, each answered and asked on."""
    roles = ("user", "assistant", "user")
    records = [
        {"messages": [{"role": role, "content": text[: 15 + i]} for role in roles]}
        for i, text in enumerate(TEXTS[:3])
    ]
    return write_lines(root / "talks.jsonl", records)


@pytest.mark.parametrize("kind", ["cut", "conversations"])
def test_what_is_listed_to_be_recorded_is_what_a_run_reads(kind, root, recorded, capsys):
    data = {"seq_length": 30}
    if kind == "conversations":
        data = {"conversations": True, "train": [str(write_conversations(root))]}
    config = write_run(root, f"listed-{kind}", **data)
    listed = root / f"prompts-{kind}.jsonl"
    for _ in range(2):
        main(["cache-teacher", "--config", str(config), "--output", str(listed), "--prompts"])
    ids = [json.loads(line)["prompt_token_ids"] for line in listed.read_text().splitlines()]
    assert f"{len(ids)} windows to be recorded" in capsys.readouterr().out
    rows = log_probs_of(root / "weights", ids, recorded.vocab_size)
    answers = [
        request_output(one, prompt_logprobs(one, its, TOP_K))
        for one, its in zip(ids, rows, strict=True)
    ]
    cache = f"cache-{kind}"
    words = ("--import", "vllm", write_lines(root / f"{cache}.jsonl", answers))
    imported(root, cache, *words, **data)
    values = run_values(root, "reads", cache=cache, **data)
    inputs = read_inputs(read_values(root / "reads.yaml", values), world_size=1)
    collator = inputs.data.collator
    teacher = CachedTeacher(
        name="teacher",
        cache=TargetCache(root / cache),
        shard=VocabShard(vocab_size=recorded.vocab_size, start=0, stop=recorded.vocab_size),
    )
    read, labels, found = [], [], []
    for block in blocks_of(inputs.data, 1 << 20):
        for sample in block.samples():
            batch = collator([sample])
            its = teacher.recorded([sample], collator)["label_log_probs"]
            side = batch.teachers["teacher"]
            bounds = side.cu_seqlens.tolist()
            texts = [slice(*pair) for pair in pairwise(bounds)]
            texts = [text for text in texts if (side.labels[0, text] >= 0).any()]
            read += [side.input_ids[0, text].tolist() for text in texts]
            labels += [side.labels[0, text] for text in texts]
            found += [its[0, text] for text in texts]
    assert len(read) >= len(ids) > 1
    of_texts = log_probs_of(root / "weights", read, recorded.vocab_size)
    for log_probs, label, its in zip(of_texts, labels, found, strict=True):
        trained = label >= 0
        expected = log_probs[trained].gather(1, label[trained, None])[:, 0]
        torch.testing.assert_close(its[trained], expected, rtol=1e-5, atol=2e-5)


def refused(root, capsys, records, *words, **data):
    """What is said of an import of these records."""
    file = write_lines(root / "refused.jsonl", records)
    config = write_run(root, "refused", **data)
    return refusal(
        capsys,
        *("cache-teacher", "--config", config, "--output", root / "none"),
        *("--import", "vllm", file, *words),
    )


def test_records_of_other_ids_are_refused_with_file_and_line(root, recorded, capsys):
    records = recorded.vllm()
    other = json.loads(json.dumps(records[2]))
    place = f"{root}/refused.jsonl:3: "
    other["prompt_token_ids"][4:6] = other["prompt_token_ids"][5:3:-1]
    rows = other["prompt_logprobs"]
    rows[4], rows[5] = rows[5], rows[4]
    said = refused(root, capsys, [*records[:2], other])
    assert f"{place}the recorded ids are of no window" in said
    assert "got 4 ids as at" in said
    without_begin = request_output(records[2]["prompt_token_ids"][1:], [None, *rows[2:]])
    without_begin["prompt_logprobs"] = [None, *records[2]["prompt_logprobs"][2:]]
    assert "where the run's begin with" in refused(root, capsys, [*records[:2], without_begin])
    early = request_output(records[2]["prompt_token_ids"][:-1], records[2]["prompt_logprobs"][:-1])
    said = refused(root, capsys, [early])
    assert f"predictions of the text at {root}/train.jsonl:3, of whose" in said
    assert "set data.append_eod to false" in said
    unknown = json.loads(json.dumps(records[2]))
    unknown["prompt_token_ids"][1] = 5000
    unknown["prompt_logprobs"][1]["5000"] = {"logprob": -9.0, "rank": 300}
    assert "got 5000; expected 0 to" in refused(root, capsys, [unknown])


def test_a_run_with_windows_that_nobody_recorded_is_refused(root, recorded, capsys):
    said = refused(root, capsys, recorded.vllm()[:4])
    assert (
        f"{root}/train.jsonl:5: the recordings lack windows of this run; got no record of" in said
    )


def test_recordings_that_are_not_of_the_whole_vocabulary_are_refused_or_normalised(
    root, recorded, capsys
):
    pairs = zip(recorded.ids, recorded.log_probs, strict=True)
    logits = [request_output(ids, prompt_logprobs(ids, rows + 9, TOP_K)) for ids, rows in pairs]
    said = refused(root, capsys, logits)
    assert "refused.jsonl:1: the recorded probabilities of a token sum to more than 1" in said
    assert "--tail renormalise" in said
    words = ("--import", "vllm", root / "refused.jsonl", "--tail", "renormalise")
    imported(root, "renormalised", *words, objective="strict_topk")
    assert "tail renormalise" in capsys.readouterr().out
    cache = TargetCache(root / "renormalised")
    assert cache.manifest.imported["tail"] == "renormalise"
    fields = from_records(
        cache.records(cache._keys[0].tobytes(), int(cache._tokens[0])), cache.form
    )
    sums = torch.logsumexp(fields["topk_logits"], dim=-1) - fields["log_normaliser"]
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--import", "trl", "x"), "no such format of recordings; got trl; expected vllm or"),
        (("--import", "vllm"), "no recording is named"),
        (("--import", "vllm", "none.jsonl"), "none.jsonl: there is no such file"),
        (
            ("--import", "vllm", "{root}/train.jsonl"),
            "train.jsonl:1: the record has no prompt_logp",
        ),
        (("--import", "distillkit", "{root}/train.jsonl"), "compression_config.yaml: the descript"),
        (("--import", "vllm", "x", "--targets", "label"), "recordings are top-k targets"),
    ],
    ids=("format", "no file", "missing", "text", "description", "label"),
)
def test_what_cannot_be_imported_is_said_in_one_line(words, message, root, capsys):
    config = write_run(root, "unread")
    words = [str(word).format(root=root) for word in words]
    said = refusal(capsys, "cache-teacher", "--config", config, "--output", root / "no", *words)
    assert message in said
    assert not (root / "no").exists()


def test_an_objective_that_reads_no_top_k_is_refused(root, recorded, capsys):
    said = refused(root, capsys, recorded.vllm(), objective="projected_kl")
    assert "projected_kl cannot use cached targets of this form" in said
