"""The launch scripts start what they say, and their configurations pass a dry run."""

import json
import os
import shutil
import signal
import subprocess
import time
from functools import cache
from pathlib import Path

import pytest

from megatron_ext.megatron_lm.arguments import add_sft_arguments
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.training import inputs
from megatron_ext.training.configuration.config import DistillConfig
from megatron_ext.training.configuration.tokenizer_arguments import add_missing_flags
from megatron_ext.training.configuration.yaml_file import read_config_file
from megatron_ext.training.dry_run import dry_run
from megatron_ext.training.metrics import read_metrics
from megatron_ext.typed_mapping import build_config
from tests.cli.run_files import REPOSITORY, write_config
from tests.training.launched_ranks import Launch
from tests.training.release_parser import RELEASES, release_parser
from tests.training.tiny_run import student_run, vocabulary, write_corpus, write_rank_list

LAUNCH = REPOSITORY / "examples" / "launch"
SCRIPTS = sorted([*LAUNCH.glob("*.sh"), *LAUNCH.glob("*.sbatch")])
PROCESSES = {"one_gpu": 1, "one_node": 8, "slurm": 32, "megatron_lm": 8, "cpu": 2}
OF_MEGATRON_LM = {"pretrain": {}, "sft": {"PRETRAINED": "checkpoints"}}
"""Scripts that run Megatron-LM's own, and the variables that one alone needs."""

_FAKES = {
    "scontrol": """
echo "scontrol $*" >> "$CALLS"
if [ "$1" = show ]; then printf 'node-a\\nnode-b\\n'; fi
""",
    # Starts the command as Slurm does on each node.
    "srun": 'shift; exec "$@"',
    "torchrun": """
echo "torchrun $*" >> "$CALLS"
echo "connections $CUDA_DEVICE_MAX_CONNECTIONS" >> "$CALLS"
sleep "${RUN_SECONDS:-0}"
exit "${RUN_EXIT:-0}"
""",
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory):
    """A folder with every file that the configurations name; the teacher says not what it is."""
    folder = tmp_path_factory.mktemp("launch")
    for name in ("text", "tokenizers", "teacher/checkpoints/iter_0000001"):
        (folder / name).mkdir(parents=True)
    for name in ("train", "validation"):
        shutil.copyfile(write_corpus(folder), folder / "text" / f"{name}.jsonl")
    tokenizers = folder / "tokenizers"
    # The heads of both vocabularies: counts and checks take as long as they are long.
    tekken = json.loads(Path(vocabulary("tekken_240911.json")).read_text())
    tekken["vocab"] = tekken["vocab"][:8000]
    tekken["config"] |= {"default_num_special_tokens": 1000, "default_vocab_size": 9000}
    (tokenizers / "student.json").write_text(json.dumps(tekken))
    write_rank_list(folder)
    shutil.copyfile(folder / "teacher.model", tokenizers / "teacher.model")
    (folder / "teacher/checkpoints/iter_0000001/common.pt").write_bytes(b"")
    (folder / "teacher/checkpoints/latest").write_text("iter_0000001")
    return folder


def test_every_configuration_has_its_script_and_its_processes():
    assert {path.stem for path in LAUNCH.glob("*.yaml")} == set(PROCESSES)
    assert {path.stem for path in SCRIPTS} == {*PROCESSES, *OF_MEGATRON_LM}


@pytest.mark.parametrize("name", PROCESSES)
def test_a_dry_run_accepts_the_configuration(workplace, monkeypatch, name):
    monkeypatch.chdir(workplace)
    monkeypatch.setattr(inputs, "build_tokenizer", _tokenizer)
    monkeypatch.setattr(SparseProjection, "from_tokenizers", _projection)
    config = build_config(DistillConfig, *read_config_file(LAUNCH / f"{name}.yaml"))
    page = dry_run(config, world_size=PROCESSES[name], has_flash=name != "cpu")
    assert page.startswith(f"processes   {PROCESSES[name]}: ")
    assert not (workplace / "runs").exists()


# All configurations name the same two files.
_tokenizer = cache(build_tokenizer)
_projection = cache(SparseProjection.from_tokenizers)


@pytest.mark.parametrize("script", [*SCRIPTS, *LAUNCH.glob("*.bash")], ids=lambda path: path.name)
def test_bash_reads_the_script(script):
    subprocess.run(["bash", "-n", script], check=True)
    assert os.access(script, os.X_OK) == (script.suffix == ".sh")


def test_the_cpu_script_trains_on_two_processes(tmp_path):
    """What torchrun makes of a command is held by ``tests/training/test_megatron_lm.py``."""
    write_corpus(tmp_path)
    write_rank_list(tmp_path)
    config = write_config(tmp_path, student_run(tmp_path, "run"))
    recorder = {"torchrun": 'echo "$*" > "$CALLS"; env >> "$CALLS"'}
    environment = {**commands(tmp_path / "commands", recorder), "CALLS": str(tmp_path / "calls")}
    script = [LAUNCH / "cpu.sh", "--config", config, "--loss-objective", "next_token"]
    subprocess.run(script, cwd=tmp_path, env=environment, check=True, timeout=30)
    command, *variables = (tmp_path / "calls").read_text().splitlines()
    head = "--standalone --nproc-per-node 2 -m megatron_ext "
    assert command.startswith(head)
    assert "CUDA_VISIBLE_DEVICES=" in variables
    words = command.removeprefix(head).split()
    ranks = Launch(words, world_size=2, folder=tmp_path, name="ranks").wait()
    assert [rank.exit_code for rank in ranks] == [0, 0], ranks
    assert [row["iteration"] for row in read_metrics(tmp_path / "run")] == [1, 2]


@pytest.mark.parametrize("release", RELEASES)
@pytest.mark.parametrize("name", OF_MEGATRON_LM)
def test_a_script_of_megatron_lm_gets_flags_that_its_release_has(tmp_path, name, release):
    (tmp_path / "megatron" / "training").mkdir(parents=True)
    recorder = {"torchrun": 'printf "%s\\n" "$@" > "$CALLS"'}
    variables = {"MEGATRON_LM_PATH": str(tmp_path), "TOKENIZER": "t.model", "DATA": "data"}
    variables |= {"CALLS": str(tmp_path / "calls"), "PROCESSES": "1", **OF_MEGATRON_LM[name]}
    environment = commands(tmp_path / "commands", recorder) | variables
    words = ["--tokenizer-library", "sentencepiece", "--lr", "1e-4"]
    subprocess.run([LAUNCH / f"{name}.sh", *words], env=environment, check=True, timeout=30)
    calls = (tmp_path / "calls").read_text().splitlines()
    place = calls.index(f"{tmp_path}/pretrain_gpt.py")
    assert calls[place - 3 : place] == ["-m", "megatron_ext", "run"]
    parser = release_parser(release)
    add_missing_flags(parser)
    add_sft_arguments(parser)
    given, unknown = parser.parse_known_args(calls[place + 1 :])
    assert unknown == []
    assert (given.lr, given.tokenizer_library) == (1e-4, "sentencepiece")
    assert (given.sft, given.tokenizer_mode) == (name == "sft", "sft" if given.sft else "text")
    del environment["DATA"]
    refused = subprocess.run(
        [LAUNCH / f"{name}.sh"], env=environment, capture_output=True, check=False
    )
    assert refused.returncode
    assert b"DATA: set it to" in refused.stderr


def commands(folder, texts):
    """An environment in which these commands are found before any other."""
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(f"#!/usr/bin/env bash\n{text}\n")
        (folder / name).chmod(0o755)
    return {**os.environ, "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("name", "words", "environment", "line"),
    [
        ("cpu", [], {}, "no text/train.jsonl in this folder: put yours there, or pass --config"),
        ("one_gpu", ["--lr", "1e-4"], {}, "no text/train.jsonl in this folder"),
        (
            "one_node",
            ["--data-train", "a.jsonl", "--data-validation=b.jsonl"],
            {"PROCESSES": "2"},
            "no tokenizers/student.json in this folder",
        ),
        ("one_node", [], {}, "torch sees no GPU here: set PROCESSES to a number, or take cpu.sh"),
        ("megatron_lm", [], {"MEGATRON_LM_PATH": ""}, "set it to a checkout of Megatron-LM"),
        ("megatron_lm", [], {"MEGATRON_LM_PATH": "absent"}, "absent, is no checkout of Megatron"),
    ],
)
def test_a_script_says_in_one_line_what_is_missing_and_starts_nothing(
    tmp_path, name, words, environment, line
):
    # A Python whose torch sees no GPU, and nothing to start.
    found = commands(tmp_path / "commands", {"python": "exit 1", "torchrun": "echo started"})
    script = [LAUNCH / f"{name}.sh", *words]
    finished = subprocess.run(
        script,
        cwd=tmp_path,
        env={**found, **environment},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode in (1, 2)
    assert finished.stdout == ""
    assert finished.stderr.count("\n") == 1
    assert line in finished.stderr


@pytest.fixture
def slurm(tmp_path):
    """The environment of a job on two nodes, with commands that only say that they were called."""
    return {
        **commands(tmp_path / "commands", _FAKES),
        "CALLS": str(tmp_path / "calls"),
        "SLURM_JOB_ID": "31",
        "SLURM_JOB_NUM_NODES": "2",
        "SLURM_JOB_NODELIST": "node-[a-b]",
        "SLURM_RESTART_COUNT": "1",
    }


def test_a_slurm_job_meets_at_its_first_node(slurm):
    script = [LAUNCH / "slurm.sbatch", "--lr", "1e-4", "--run-dir", "a folder"]
    subprocess.run(["bash", *script], env=slurm, check=True, timeout=30)
    calls = Path(slurm["CALLS"]).read_text().splitlines()
    assert calls[0] == "scontrol show hostnames node-[a-b]"
    assert calls[1] == (
        "torchrun --nnodes 2 --nproc-per-node 8 --max-restarts 3 --rdzv-id 31-1 "
        "--rdzv-backend c10d --rdzv-endpoint node-a:20031 -m megatron_ext distill "
        "--config examples/launch/slurm.yaml --lr 1e-4 --run-dir a folder"
    )
    assert calls[2] == "connections 1"
    assert len(calls) == 3


def test_a_slurm_job_at_its_time_limit_goes_back_into_the_queue(slurm):
    calls = Path(slurm["CALLS"])
    job = subprocess.Popen(
        ["bash", str(LAUNCH / "slurm.sbatch")], env={**slurm, "RUN_SECONDS": "60"}
    )
    try:
        deadline = time.monotonic() + 30
        while "connections" not in (calls.read_text() if calls.exists() else ""):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        job.send_signal(signal.SIGUSR1)
        assert job.wait(30) == 0
    finally:
        job.kill()
    assert calls.read_text().splitlines()[-1] == "scontrol requeue 31"


def test_a_slurm_job_that_fails_is_not_queued_again(slurm):
    finished = subprocess.run(
        ["bash", LAUNCH / "slurm.sbatch"], env={**slurm, "RUN_EXIT": "3"}, check=False, timeout=30
    )
    assert finished.returncode == 3
    assert "requeue" not in Path(slurm["CALLS"]).read_text()
