"""``megatron-ext distill --dry-run`` finds what is wrong, says what it takes, leaves nothing."""

import json

import pytest
import torch

from megatron_ext.cli.main import main
from megatron_ext.errors import CheckpointError, ConfigError
from megatron_ext.projection import SparseProjection
from megatron_ext.projection.nemo.legacy_file import write_legacy_file
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training.dry_run import dry_run
from tests.cli.run_files import contents, refusal, write_config
from tests.fork_server import run_python
from tests.training.tiny_run import changed, student_run

_EIGHT_PROCESSES = ("--dry-run", "--world-size", "8")
_LOADED = """
import sys
from megatron_ext.cli.main import main
main(sys.argv[1:])
import torch.distributed as dist
print("megatron-core" if any(name.startswith("megatron.") for name in sys.modules) else "none")
print(dist.is_initialized())
"""


def test_it_reports_on_all_processes_and_starts_and_writes_nothing(folder):
    config = student_run(folder, "planned", global_batch_size=8, pipeline_model_parallel_size=2)
    file = write_config(folder, config)
    before = contents(folder)
    finished = run_python(_LOADED, "distill", f"--config={file}", *_EIGHT_PROCESSES)
    assert finished.stderr == ""
    *page, loaded, is_initialized = finished.stdout.splitlines()
    assert (loaded, is_initialized) == ("none", "False")
    assert page[0] == "processes   8: TP 1 x PP 2 x DP 4"
    text = "\n".join(page)
    for part in (
        "24 documents",
        "model and tokenizer fit",
        "stage 0",
        "stage 1",
        "teacher targets",
    ):
        assert part in text
    assert page[-1] == "nothing was started, and nothing was written"
    assert contents(folder) == before


def test_a_projection_file_of_the_known_tools_is_read_as_one_of_ours(folder, tmp_path, capsys):
    config = student_run(folder, "planned")
    student, teacher = (
        build_tokenizer(section) for section in (config.tokenizer, config.teacher.tokenizer)
    )
    path = tmp_path / "map.pt"
    write_legacy_file(SparseProjection.from_tokenizers(student, teacher), path)
    config = changed(config, projection=str(path))
    dry_run(config, world_size=1)
    assert capsys.readouterr().err == ""
    content = torch.load(path, weights_only=True)
    torch.save({name: content[name] for name in ("indices", "likelihoods")}, path)
    dry_run(config, world_size=1)
    assert capsys.readouterr().err.startswith(
        f"warning: {path}: no fingerprint of the student and of the teacher: that it is for"
    )


def test_processes_that_make_no_whole_replica_are_refused(folder):
    config = student_run(folder, "planned", pipeline_model_parallel_size=2)
    with pytest.raises(ConfigError, match=r"whole model replicas.* pass --world-size"):
        dry_run(config, world_size=3)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_layers": 4}, "another num_layers"),
        ({"swiglu": False}, "another swiglu"),
        ({"kv_channels": 24}, "another kv_channels"),
        ({"num_experts": 4}, "another num_experts"),
    ],
    ids=["depth", "activation", "head width", "experts"],
)
def test_a_teacher_that_its_checkpoint_does_not_fit_is_found(folder, change, message):
    config = student_run(folder, "planned")
    with pytest.raises(CheckpointError, match=message):
        dry_run(changed(config, teacher={"model": change}), world_size=1)


def test_a_size_of_a_teacher_that_is_given_or_follows_is_the_same(folder):
    config = student_run(folder, "planned")
    model = config.teacher.model
    given = {
        "num_query_groups": model.query_groups,
        "kv_channels": model.head_width,
        "ffn_hidden_size": model.ffn_width,
    }
    assert all(getattr(model, name) is None for name in given)
    page = dry_run(changed(config, teacher={"model": given}), world_size=1)
    assert "model and tokenizer fit" in page
    with pytest.raises(CheckpointError, match=r"another ffn_hidden_size; got 8; expected"):
        dry_run(changed(config, teacher={"model": {"ffn_hidden_size": 8}}), world_size=1)


def test_a_teacher_of_another_tokenizer_is_found(folder):
    config = student_run(folder, "planned")
    with pytest.raises(CheckpointError, match="another tokenizer"):
        dry_run(changed(config, teacher={"tokenizer": config.tokenizer}), world_size=1)


def test_a_run_is_not_planned_by_halves(folder, capsys):
    file = write_config(folder, student_run(folder, "planned"))
    errors = refusal(capsys, "distill", "--config", file, "--world-size", "8")
    assert "add --dry-run" in errors


def test_tensor_parallel_ranks_that_share_columns_send_them(folder):
    alone, over_two = (dry_run(_sharded(folder, ranks), world_size=ranks) for ranks in (1, 2))
    assert "  tensor parallel" not in alone
    assert "  tensor parallel" in over_two


def _sharded(folder, ranks):
    return student_run(folder, "planned", tensor_model_parallel_size=ranks)


def test_a_run_begins_with_what_it_is_and_not_with_every_setting(folder):
    text = (folder / "teacher.log").read_text()
    lines = text[text.index("device: ") :].partition("\n\n")[0].splitlines()
    parts = "device: processes step layers student weights train objective training memory run"
    assert [line.split()[0] for line in lines] == parts.split()
    assert "clip_grad" not in text


def alone(folder, name, **sections):
    """A configuration file of the tiny student without a teacher."""
    config = student_run(folder, name)
    config = changed(config, teacher=None, loss={"objective": "next_token"}, **sections)
    return write_config(folder, config)


@pytest.mark.parametrize(("verb", "conversations"), [("train", False), ("sft", True)])
def test_a_verb_without_a_teacher_is_distill_by_next_token(folder, verb, conversations, capsys):
    file = alone(folder, f"plan-{verb}", data={"conversations": conversations})
    words = (f"--config={file}", "--tokenizer-prompt-format=identity", "--dry-run")
    if conversations:
        turns = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "日本語。"}]
        lines = [{"messages": turns}] * 8
        path = folder / "turns.jsonl"
        path.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        words += ("--data-train", str(path), "--data-validation", str(path))
    main([verb, *words])
    page = capsys.readouterr().out
    assert "nothing was started" in page
    main(["distill", *words])
    assert capsys.readouterr().out == page


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--teacher-checkpoint", "t"), "teacher: this verb trains without a teacher"),
        (("--projection", "p"), "projection: this verb trains without a teacher"),
        (("--loss-objective", "alm"), "loss.objective: this verb has another value"),
        (("--data-conversations",), "train on conversations with megatron-ext sft"),
    ],
)
def test_a_verb_without_a_teacher_says_which_verb_has_one(folder, words, expected, capsys):
    errors = refusal(capsys, "train", "--config", alone(folder, "refused"), *words)
    assert expected in errors
    file = write_config(folder, student_run(folder, "taught"))
    assert "megatron-ext distill" in refusal(capsys, "sft", "--config", file)
