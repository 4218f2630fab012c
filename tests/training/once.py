"""What a rank that makes many runs does once: it reads each vocabulary and the weights that runs
start from, aligns each text, and compares each pair of vocabularies."""

from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cache, partial
from unittest.mock import patch

import yaml

from megatron_ext.data.aligner import TextAligner
from megatron_ext.losses import CompletionTable
from megatron_ext.projection import SparseProjection
from megatron_ext.tokenizers import build_tokenizer
from megatron_ext.tokenizers.assets import METADATA_FILE
from megatron_ext.tokenizers.saved_tokenizer import load_saved
from megatron_ext.training.checkpoints import reader
from megatron_ext.training.checkpoints.tokenizer import checkpoint_record
from tests.training.weights_once import load_weights_once


@contextmanager
def once():
    """Within it, what was done in an earlier run of this process is not done again."""
    with ExitStack() as stack:
        for patched in _PATCHED:
            stack.enter_context(patched())
        yield


def _load_saved(kind, folder):
    """Check a saved tokenizer, unless it is one that was checked before."""
    metadata = (folder / METADATA_FILE).read_bytes()
    if metadata not in _checked:
        load_saved(kind, folder)
        _checked.add(metadata)
    return None


class _AlignsOnce(TextAligner):
    """Aligns a text once for all runs with the same tokenizers."""

    def __init__(self, student_tokenizer, teacher_tokenizers=()):
        super().__init__(student_tokenizer, teacher_tokenizers)
        self._known = _aligned.setdefault((student_tokenizer, *teacher_tokenizers), {})

    def align(self, texts):
        """``TextAligner.align``."""
        new = [text for text in dict.fromkeys(texts) if text not in self._known]
        self._known.update(zip(new, super().align(new), strict=True))
        return [self._known[text] for text in texts]


def _record_of(checkpoint):
    """``checkpoint_record``, from a file that was read if it is the same."""
    path = checkpoint / reader.COMMON_FILE
    if not path.exists():
        return checkpoint_record(checkpoint)
    stat = path.stat()
    key = path, stat.st_ino, stat.st_mtime_ns
    if key not in _records:
        _records[key] = checkpoint_record(checkpoint)
    return _records[key]


def _index_of(manifest):
    """``read_index``, from one that was read if it is the same, whatever the layout."""
    content = manifest.read(reader.INDEX_FILE)
    if content not in _indices:
        _indices[content] = _read_index(manifest)
    return replace(_indices[content])


_read_index = reader.read_index
_checked, _aligned, _records, _indices = set(), {}, {}, {}
_TRAINING = "megatron_ext.training"
_PATCHED = (
    partial(patch, f"{_TRAINING}.inputs.build_tokenizer", cache(build_tokenizer)),
    partial(patch, "megatron_ext.tokenizers.text_tokenizer.load_saved", _load_saved),
    partial(patch, "megatron_ext.data.aligner.TextAligner", _AlignsOnce),
    partial(patch, f"{_TRAINING}.checkpoints.tokenizer.checkpoint_record", _record_of),
    partial(patch, f"{_TRAINING}.checkpoints.reader.read_index", _index_of),
    partial(patch, f"{_TRAINING}.megatron_models.first_weights.load_weights", load_weights_once),
    *(
        partial(patch.object, kind, "from_tokenizers", cache(kind.from_tokenizers))
        for kind in (SparseProjection, CompletionTable)
    ),
    # The same text, by libyaml.
    partial(patch, "yaml.SafeDumper", yaml.CSafeDumper),
)
