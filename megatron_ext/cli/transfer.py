"""Give a model another tokenizer.

    megatron-ext transfer audit models/Qwen3-0.6B tokenizers/llama3_2 --data text.jsonl
    megatron-ext transfer init models/Qwen3-0.6B --tokenizer tokenizers/llama3_2 --output new/
    megatron-ext transfer extend models/Qwen3-0.6B --tokens words.txt --output with-words/
    megatron-ext transfer extend models/Qwen3-0.6B --merges 1000 --data text.jsonl --output longer/
    megatron-ext transfer probe new-a/ new-b/ --data train.jsonl --held-out test.jsonl

The new model is a starting point: distil it from what it was (docs/transfer.md).
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Final

from megatron_ext.cli.actions import Action, add_actions
from megatron_ext.cli.output import quiet_libraries
from megatron_ext.errors import ConfigError
from megatron_ext.evaluation.tasks.task import texts_of
from megatron_ext.huggingface.checkpoint_files import check_checkpoint_folder, is_checkpoint_folder
from megatron_ext.huggingface.hub import hub_model
from megatron_ext.imports import large_imports
from megatron_ext.tokenizers import (
    MegatronTokenizer,
    MegatronTokenizerText,
    TokenizerConfig,
    build_tokenizer,
)
from megatron_ext.tokenizers.tokenizer_files import local_files
from megatron_ext.training.run_folder import TOKENIZER_FOLDER
from megatron_ext.transfer.audit import audit_transfer
from megatron_ext.transfer.extend import extend_tokenizer, read_tokens
from megatron_ext.transfer.probe import ProbeOptions, probe, run_verb, table, write_results

if TYPE_CHECKING:
    from megatron_ext.transfer.options import TransferReport

_TEXTS: Final = 1000
"""Most records of a text that an audit reads."""

_SHOWN: Final = 8


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add a subparser for each action."""
    add_actions(parser, _ACTIONS)


def run(arguments: argparse.Namespace) -> None:
    """Run the action."""
    _ACTIONS[arguments.action].run(arguments)


def add_init_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``init``."""
    parser.add_argument(
        "model",
        type=Path,
        metavar="MODEL",
        help="HuggingFace folder, a run, a checkpoint, or a name on the hub",
    )
    new = parser.add_mutually_exclusive_group(required=True)
    new.add_argument(
        "--tokenizer",
        "--tokenizer-model",
        type=Path,
        metavar="PATH",
        help="file or folder of the new tokenizer, a run, or a name on the hub",
    )
    new.add_argument(
        "--to-bytes", action="store_true", help="one token for each byte: the library byte-level"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="new folder"
    )
    parser.add_argument(
        "--method",
        choices=("fvt", "fvt-asymmetric", "omp", "mean", "hypernet"),
        default="fvt",
        help="rows of tokens that the old vocabulary lacks: the mean of the old pieces (fvt); the "
        "same with a head weighted by bytes (fvt-asymmetric); combinations that a donor with the "
        "new vocabulary shows (omp); the mean of all rows (mean); what a network predicts that was "
        "trained for the model (hypernet)",
    )
    parser.add_argument("--donor", type=Path, metavar="DIR", help="model with the new vocabulary")
    parser.add_argument("--hypernet", type=Path, metavar="DIR", help="network of train-hypernet")
    parser.add_argument(
        "--k", type=int, default=64, metavar="INT", help="tokens in a combination of omp (64)"
    )
    parser.add_argument(
        "--calibrate-norms",
        action="store_true",
        help="give rows that are not copies the mean norm of the old rows",
    )
    parser.add_argument(
        "--untie", action="store_true", help="make a tied head a separate matrix, with its own rule"
    )
    parser.add_argument(
        "--keep-digits",
        action="store_true",
        help="split numbers as the old tokenizer does, which changes the new tokenizer",
    )
    parser.add_argument(
        "--pad-to-multiple-of",
        type=int,
        default=1,
        metavar="INT",
        help="pad the model's rows to a multiple (1)",
    )
    parser.add_argument(
        "--as-checkpoint",
        action="store_true",
        help="write a folder of megatron-core checkpoints, as import-hf does",
    )


def init(arguments: argparse.Namespace) -> None:
    """Write a model with the vocabulary of another tokenizer, as a HuggingFace folder.

    megatron-ext transfer init models/Qwen3-0.6B --tokenizer llama3_2/ --output qwen-with-llama/

    Tokens with the same bytes keep their rows bit for bit, control tokens by name and then by role;
    --method makes the others. All other weights, and everything that the new vocabulary does not
    touch, are unchanged. transfer.json in the new folder says how many rows are copies,
    and which are means.
    """
    quiet_libraries()
    with large_imports():
        from tqdm import tqdm

        from megatron_ext.huggingface.tensor_files import check_target
        from megatron_ext.transfer.options import TransferOptions
        from megatron_ext.transfer.write_model import transfer

    # Before a checkpoint is exported.
    check_target(arguments.output)
    with ExitStack() as stack:
        tokenizer = stack.enter_context(_tokenizer_folder(arguments.tokenizer))
        model = stack.enter_context(_as_folder(arguments.model))
        donor = arguments.donor and stack.enter_context(_as_folder(arguments.donor))
        options = TransferOptions(
            method=arguments.method,
            donor=donor,
            hypernet=arguments.hypernet,
            k=arguments.k,
            calibrates_norms=arguments.calibrate_norms,
            unties=arguments.untie,
            pad_to_multiple_of=arguments.pad_to_multiple_of,
            keeps_digits=arguments.keep_digits,
        )
        report = transfer(
            model,
            tokenizer,
            stack.enter_context(_target(arguments)),
            options,
            wrap=lambda names: tqdm(names, unit="tensor", leave=False, disable=None),
        )
    _tell(arguments.output, report)


@contextmanager
def _target(arguments: argparse.Namespace) -> Iterator[Path]:
    """The folder to write to; for a checkpoint of ours one beside it, which is imported."""
    if not arguments.as_checkpoint:
        yield arguments.output
        return
    from megatron_ext.huggingface.tensor_files import check_target

    check_target(arguments.output)
    arguments.output.absolute().parent.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory(dir=arguments.output.absolute().parent) as beside:
        folder = Path(beside) / arguments.output.name
        yield folder
        # In a process of its own: an import runs on the CPU, where a method may have used a GPU.
        run_verb(["import-hf", str(folder), str(arguments.output)])


def _tell(output: Path, report: TransferReport) -> None:
    """Print what the rows of a new model are."""
    means = ", ".join(report.means[:_SHOWN]) + (", ..." if len(report.means) > _SHOWN else "")
    rule = (
        "one matrix for embedding and head, by the rule of the embedding"
        if report.is_tied
        else ("embedding and head apart")
    )
    lines = [
        f"{output}: {report.new_ids:,} ids in {report.new_rows:,} rows "
        f"(before {report.old_ids:,} in {report.old_rows:,}), {rule}",
        f"copied    {report.copied:,}",
        f"combined  {report.combined:,} ({report.method})",
        f"mean      {len(report.means):,}{f': {means}' if means else ''}",
        f"stops     {report.stop_ids}",
    ]
    if report.lost_stop_ids:
        lines.append(f"note: nothing stands for the old stop tokens {report.lost_stop_ids}")
    if report.dropped_generation_keys:
        keys = ", ".join(report.dropped_generation_keys)
        lines.append(f"note: left out of the generation config, as they name old ids: {keys}")
    if report.unusual_rows:
        lines.append(f"warning: far longer than in the donor: {report.unusual_rows[:_SHOWN]}")
    sys.stdout.write("\n".join(lines) + "\n")


def add_extend_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``extend``."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="HuggingFace folder, or a name on the hub"
    )
    given = parser.add_mutually_exclusive_group(required=True)
    given.add_argument(
        "--tokens",
        type=Path,
        metavar="FILE",
        help="new tokens, one a line; one JSON string a line in a .jsonl file",
    )
    given.add_argument(
        "--merges", type=int, metavar="INT", help="number of merges to learn from --data"
    )
    parser.add_argument("--data", type=Path, metavar="FILE", help="text, or JSON lines with a text")
    parser.add_argument(
        "--text-field", default="text", help="field of a record that holds the text"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="new folder"
    )
    parser.add_argument(
        "--method",
        choices=("fvt", "fvt-asymmetric", "mean"),
        default="fvt",
        help="rows of the new tokens (fvt)",
    )
    parser.add_argument(
        "--pad-to-multiple-of",
        type=int,
        default=1,
        metavar="INT",
        help="pad the model's rows to a multiple (1)",
    )
    parser.add_argument(
        "--distill",
        type=int,
        default=0,
        metavar="STEPS",
        help="steps that train the new rows so that the model predicts --data as before (0)",
    )
    parser.add_argument(
        "--lr", type=float, default=1e-3, metavar="X", help="learning rate of --distill (1e-3)"
    )
    parser.add_argument("--seed", type=int, default=0, metavar="INT", help="seed of --distill (0)")


def extend(arguments: argparse.Namespace) -> None:
    """Add tokens to a model's vocabulary.

    megatron-ext transfer extend models/Qwen3-0.6B --tokens words.txt --output models/with-words
    megatron-ext transfer extend MODEL --merges 1000 --data text.jsonl --distill 500 --output NEW

    Texts become ordinary tokens with the next ids, found in a text before all others; merges go on
    where those of a BPE end. Old rows stay bit for bit, and a new one starts from the pieces that
    spelled its text; with --distill it learns to stand for them (arXiv 2505.20133).
    """
    quiet_libraries()
    needs_text = arguments.merges is not None or arguments.distill > 0
    if needs_text and arguments.data is None:
        raise ConfigError("merges and distillation need a text", where="--data", got="none")
    texts = texts_of(arguments.data, arguments.text_field) if needs_text else []
    tokens = [] if arguments.tokens is None else read_tokens(arguments.tokens)
    with large_imports():
        from megatron_ext.huggingface.tensor_files import check_target
        from megatron_ext.transfer.merges import learn_merges
        from megatron_ext.transfer.options import TransferOptions
        from megatron_ext.transfer.write_model import transfer_model

    check_target(arguments.output)
    model = _local(arguments.model)
    check_checkpoint_folder(model)
    options = TransferOptions(
        method=arguments.method, pad_to_multiple_of=arguments.pad_to_multiple_of
    )
    with TemporaryDirectory() as made:
        tokenizer = Path(made)
        if arguments.merges is None:
            new = set(extend_tokenizer(model, tokenizer, tokens))
            old = [repr(token) for token in tokens if token not in new]
            if old:
                shown = ", ".join(old[:_SHOWN]) + (", ..." if len(old) > _SHOWN else "")
                sys.stdout.write(f"tokens already, which stay as they are: {len(old):,}: {shown}\n")
        else:
            learnt = learn_merges(model, tokenizer, texts, arguments.merges)
            sys.stdout.write(
                f"{len(learnt.pairs):,} merges: the text has {learnt.tokens_after:,} tokens, "
                f"{learnt.tokens_before:,} before\n"
            )
        if not arguments.distill:
            report = transfer_model(model, tokenizer, arguments.output, options)
            _tell(arguments.output, report)
            return
        arguments.output.absolute().parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(dir=arguments.output.absolute().parent) as beside:
            extended = Path(beside) / "extended"
            report = transfer_model(model, tokenizer, extended, options)
            _distil(arguments, model, extended, texts)
    _tell(arguments.output, report)


def _distil(arguments: argparse.Namespace, model: Path, extended: Path, texts: list[str]) -> None:
    """Train the rows of an extended model, and write it to the output."""
    from megatron_ext.transfer.token_distillation import (
        DistillationOptions,
        distil_rows,
        find_snippets,
    )
    from megatron_ext.transfer.write_model import replace_rows

    options = DistillationOptions(steps=arguments.distill, lr=arguments.lr, seed=arguments.seed)
    old, new = _tokenizer(str(model)), _tokenizer(str(extended))
    snippets = find_snippets(old, new, texts, options)
    found = distil_rows(
        extended, old, new, snippets, options, tell=lambda line: print(line, file=sys.stderr)
    )
    replace_rows(extended, arguments.output, found.rows)
    without = [i for i in range(old.vocab_size, new.vocab_size) if i not in found.snippets]
    sys.stdout.write(
        f"distilled {len(found.snippets):,} rows from {sum(found.snippets.values()):,} snippets; "
        f"difference {found.losses[0]:.4f} at first, {found.losses[-1]:.4f} at last\n"
    )
    if without:
        named = ", ".join(
            repr((new.token_bytes(i) or b"").decode(errors="replace")) for i in without[:_SHOWN]
        )
        more = ", ..." if len(without) > _SHOWN else ""
        sys.stdout.write(f"not in the text, as they started: {len(without):,}: {named}{more}\n")


def _local(model: Path) -> Path:
    """The path of a model, or the folder of one that is named as on the hub."""
    return hub_model(str(model), where="the model") or model


@contextmanager
def _as_folder(model: Path) -> Iterator[Path]:
    """The HuggingFace folder of a model; a temporary one of a checkpoint of ours."""
    model = _local(model)
    if is_checkpoint_folder(model):
        yield model
        return
    from megatron_ext.training.checkpoints.huggingface_export import export_huggingface

    with TemporaryDirectory() as folder:
        exported = Path(folder) / model.name
        export_huggingface(model, exported)
        yield exported


def add_audit_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``audit``."""
    parser.add_argument("old", metavar="OLD", help="the model's tokenizer")
    parser.add_argument("new", metavar="NEW", help="the new tokenizer")
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        help=f"text, or JSON lines with a text; the first {_TEXTS:,} records are read",
    )
    parser.add_argument(
        "--text-field", default="text", help="field of a record that holds the text"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def audit(arguments: argparse.Namespace) -> None:
    """Compare two tokenizers before a transfer.

    megatron-ext transfer audit models/Qwen3-0.6B tokenizers/llama3_2 --data text.jsonl

    Shares of copied tokens, digits, spaces, line breaks, control tokens by role, and bytes a token
    by script; the exit code is 0 whatever is found.
    """
    texts = []
    if arguments.data is not None:
        texts = texts_of(arguments.data, arguments.text_field)[:_TEXTS]
    found = audit_transfer(_tokenizer(arguments.old), _tokenizer(arguments.new), texts)
    if arguments.json:
        sys.stdout.write(json.dumps(found.as_row(), ensure_ascii=False) + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in found.lines())


def _tokenizer(model: str) -> MegatronTokenizerText:
    """The tokenizer of a file, a folder, a run or a checkpoint."""
    kept = _kept_tokenizer(Path(model))
    if kept is not None:
        return MegatronTokenizer.from_pretrained(kept)
    return build_tokenizer(TokenizerConfig(model=model))


def _kept_tokenizer(path: Path) -> Path | None:
    """Folder of the tokenizer in a run or a checkpoint of ours; None for others."""
    kept = path / TOKENIZER_FOLDER
    return kept if kept.is_dir() else None


@contextmanager
def _tokenizer_folder(path: Path | None) -> Iterator[Path | None]:
    """A folder with a tokenizer's files, which a file, a run or a name on the hub may stand for."""
    if path is None:
        # Bytes have no files.
        yield None
        return
    if not path.exists():
        path = local_files(str(path))
    kept = _kept_tokenizer(path)
    if path.is_dir():
        yield path if kept is None else kept
        return
    with TemporaryDirectory() as folder:
        copy = Path(folder) / TOKENIZER_FOLDER
        _tokenizer(str(path)).save_pretrained(copy)
        yield copy


def add_probe_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``probe``."""
    parser.add_argument(
        "models", type=Path, nargs="+", metavar="MODEL", help="HuggingFace folders to compare"
    )
    parser.add_argument("--data", type=Path, required=True, metavar="FILE", help="text to train on")
    parser.add_argument(
        "--held-out", type=Path, required=True, metavar="FILE", help="held-out text"
    )
    parser.add_argument(
        "--run-dir", type=Path, required=True, metavar="DIR", help="folder for runs and results"
    )
    parser.add_argument("--lr", type=float, default=1e-4, metavar="X", help="learning rate (1e-4)")
    parser.add_argument(
        "--global-batch-size", type=int, default=8, metavar="INT", help="rows of a step (8)"
    )
    parser.add_argument(
        "--seq-length", type=int, default=256, metavar="INT", help="tokens of a row (256)"
    )
    parser.add_argument("--limit", type=int, metavar="INT", help="most held-out texts")


def run_probe(arguments: argparse.Namespace) -> None:
    """Rank models by their bits per byte after 0, 10 and 50 optimizer steps.

    megatron-ext transfer probe fvt/ omp/ --data train.jsonl --held-out test.jsonl --run-dir probe/

    Every model is trained on the same text without a teacher. The order is that after 50 steps:
    right after a transfer the numbers rank methods wrongly. probe.json and probe.png are in
    --run-dir.
    """
    options = ProbeOptions(
        data=arguments.data,
        held_out=arguments.held_out,
        run_dir=arguments.run_dir,
        lr=arguments.lr,
        global_batch_size=arguments.global_batch_size,
        seq_length=arguments.seq_length,
        limit=arguments.limit,
    )
    rows = probe(arguments.models, options, lambda line: print(line, file=sys.stderr))
    write_results(rows, options)
    sys.stdout.write(table(rows))


def add_train_hypernet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags of ``train-hypernet``."""
    parser.add_argument(
        "model", type=Path, metavar="MODEL", help="HuggingFace folder, or a name on the hub"
    )
    parser.add_argument(
        "--data", type=Path, required=True, metavar="FILE", help="text to learn from"
    )
    parser.add_argument(
        "--text-field", default="text", help="field of a record that holds the text"
    )
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="new folder"
    )
    for name, default, words in (
        ("steps", 1000, "optimizer steps"),
        ("batch-size", 8, "texts of a step"),
        ("seq-length", 128, "tokens of a text"),
        ("vocabulary-size", 4096, "most tokens of a learnt vocabulary"),
        ("layers", 2, "layers of the network"),
        ("hidden", 128, "width of the network"),
        ("seed", 0, "seed"),
    ):
        parser.add_argument(
            f"--{name}", type=int, default=default, metavar="INT", help=f"{words} ({default})"
        )
    parser.add_argument("--lr", type=float, default=1e-3, metavar="X", help="learning rate (1e-3)")


def train_hypernet(arguments: argparse.Namespace) -> None:
    """Train a network that predicts the rows of new tokens from their old pieces.

    megatron-ext transfer train-hypernet models/Qwen3-0.6B --data text.jsonl --output hypernet/

    Vocabularies are learnt from the text on the fly (arXiv 2405.07883), so that one network serves
    any tokenizer that the model goes over to: transfer init --method hypernet --hypernet hypernet/.
    """
    quiet_libraries()
    texts = texts_of(arguments.data, arguments.text_field)
    with large_imports():
        from megatron_ext.huggingface.tensor_files import check_target
        from megatron_ext.transfer.train_hypernetwork import (
            HypernetworkTraining,
            train_hypernetwork,
        )

    check_target(arguments.output)
    model = _local(arguments.model)
    check_checkpoint_folder(model)
    names = ("steps", "batch_size", "seq_length", "vocabulary_size", "layers", "hidden", "seed")
    options = HypernetworkTraining(
        lr=arguments.lr, **{name: getattr(arguments, name) for name in names}
    )
    network = train_hypernetwork(
        model, texts, options, tell=lambda line: print(line, file=sys.stderr)
    )
    network.save(arguments.output)
    sys.stdout.write(f"{arguments.output}\n")


_ACTIONS: Final = {
    "init": Action(add_init_flags, init),
    "extend": Action(add_extend_flags, extend),
    "audit": Action(add_audit_flags, audit),
    "probe": Action(add_probe_flags, run_probe),
    "train-hypernet": Action(add_train_hypernet_flags, train_hypernet),
}
