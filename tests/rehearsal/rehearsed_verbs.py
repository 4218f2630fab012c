"""Verbs that read models, on the pretended device and on a CPU: what they print."""

import io
from contextlib import chdir, redirect_stdout
from pathlib import Path

from megatron_ext.cli.main import main
from tests.huggingface.tiny_models import save_model, save_tokenizer
from tests.rehearsal.pretended_cuda import EVENTS
from tests.transfer.conftest import OTHER_WORDS

RUN = (
    "--run-dir run --initial-checkpoint student --seq-length 32 --data-train text.jsonl "
    "--teacher-checkpoint teacher --teacher-seq-length 40 --global-batch-size 2 --precision fp32"
)
VERBS = {
    "distill": f"distill --train-iters 2 --data-validation two.jsonl {RUN}",
    "export": "export-hf run exported",
    "cache": f"cache-teacher --train-iters 1 -o cache --targets topk --top-k 8 {RUN}",
    "evaluate": "evaluate --model run --precision fp32 --task bits_per_byte --data two.jsonl",
    "ensemble": "evaluate --model run --model teacher --mode byte --precision fp32 "
    "--task bits_per_byte --data two.jsonl",
    "generate": "generate --model exported --prompt the --temperature 0 --max-new-tokens 6 "
    "--precision fp32",
    "combined": "transfer init student --tokenizer teacher --donor teacher --method omp -o new",
    "extended": "transfer extend student --tokens words.txt --data two.jsonl --distill 2 -o longer",
    "network": "transfer train-hypernet student --data two.jsonl --steps 2 -o network",
    "predicted": "transfer init student --tokenizer teacher --method hypernet --hypernet network "
    "-o predicted",
    "probe": "transfer probe predicted --data text.jsonl --held-out two.jsonl --run-dir probe",
}
"""By name; later ones read what earlier ones wrote."""


def prepare_models(folder: Path) -> None:
    """Two models of different words, and texts."""
    folder.mkdir()
    save_model("llama", folder / "student")
    save_model("qwen3", folder / "teacher")
    save_tokenizer(folder / "teacher", **OTHER_WORDS)
    line = '{"text": "the theory of the other thing, a question of the weather"}\n'
    (folder / "text.jsonl").write_text(line * 40)
    (folder / "two.jsonl").write_text(line * 2)
    (folder / "words.txt").write_text("weather\nquestion\n")


def rehearse_verbs(folder: Path) -> dict[str, dict[str, object]]:
    """By name what each verb printed, and which tensors of host and device met in it."""
    answers: dict[str, dict[str, object]] = {}
    for name in VERBS:
        EVENTS.clear()
        answers[name] = {"printed": printed(folder, name), "mismatches": EVENTS.lines("mismatch")}
    return answers


def printed(folder: Path, name: str) -> list[str]:
    """The last two lines of a verb's output, its results; the others describe devices, too."""
    with chdir(folder), redirect_stdout(io.StringIO()) as output:
        main(VERBS[name].split())
    return output.getvalue().splitlines()[-2:]
