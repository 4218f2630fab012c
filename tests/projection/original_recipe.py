"""The default recipe of the x-token tools, in plain dense steps, to make files as they make them.

Written from a description of what those tools do: NeMo RL at 7ea279ab, tools/x_token. It shares
nothing with what it tests but the tokenizer files.
"""

import difflib
import re
from collections import defaultdict

import torch

PIECES = 4
PREPARED_SLOTS = 32
SCALE_TRICK = 0.2
ROWS_AT_ONCE = 1024


def decay(ids):
    weights = [0.9 * 0.1**place for place in range(len(ids))]
    return [weight / sum(weights) for weight in weights]


def is_left_out(name):
    return name in ("<|endoftext|>", "<eos>") or re.fullmatch(r"<\|.*\|>", name) is not None


def add_spellings(counts, source, target, *, reverse):
    names = [source.id_to_token(i) for i in range(source.get_vocab_size())]
    ids = [i for i, name in enumerate(names) if not is_left_out(name)]
    texts = [source.decode([i], skip_special_tokens=False) for i in ids]
    for token_id, encoded in zip(
        ids, target.encode_batch_fast(texts, add_special_tokens=False), strict=True
    ):
        pieces = encoded.ids[:PIECES]
        for piece, weight in zip(pieces, decay(pieces), strict=True):
            counts[(piece, token_id) if reverse else (token_id, piece)] += weight


def words(name):
    return {word for word in re.findall(r"[a-z]+", name.lower()) if len(word) > 2}


def similarity(first, second):
    both, either = words(first) & words(second), words(first) | words(second)
    jaccard = len(both) / len(either) if either else 0.0
    return 0.6 * difflib.SequenceMatcher(None, first, second).ratio() + 0.4 * jaccard


def add_special_tokens(counts, student, teacher):
    candidates = bracketed(teacher)
    for name, student_id in bracketed(student):
        found = [(similarity(name, other), teacher_id) for other, teacher_id in candidates]
        for alike, teacher_id in sorted(found, reverse=True)[:PREPARED_SLOTS]:
            if alike >= 0.3:
                counts[student_id, teacher_id] += 0.8 * alike


def bracketed(tokenizer):
    return [pair for pair in tokenizer.get_vocab().items() if re.fullmatch("<.+>", pair[0])]


def prepared_table(student, teacher, slots=PREPARED_SLOTS, *, rows=None, width=None):
    """Step 1: indices and likelihoods [Vs, slots], the last slot overwritten.

    Dense as the original, but for some rows at a time; rows not among ``rows`` stay empty.
    """
    counts = defaultdict(float)
    add_spellings(counts, student, teacher, reverse=False)
    add_spellings(counts, teacher, student, reverse=True)
    add_special_tokens(counts, student, teacher)
    by_row = defaultdict(dict)
    for (row, column), weight in counts.items():
        by_row[row][column] = weight
    height = student.get_vocab_size()
    indices = torch.full((height, slots), -1)
    likelihoods = torch.zeros((height, slots), dtype=torch.bfloat16)
    rows = list(range(height)) if rows is None else rows
    for start in range(0, len(rows), ROWS_AT_ONCE):
        block = rows[start : start + ROWS_AT_ONCE]
        matrix = torch.zeros(len(block), width or teacher.get_vocab_size(), dtype=torch.bfloat16)
        for place, row in enumerate(block):
            columns = torch.tensor(list(by_row[row]), dtype=torch.int64)
            matrix[place, columns] = torch.tensor(list(by_row[row].values())).to(torch.bfloat16)
        matrix = matrix / matrix.sum(dim=1, keepdim=True).clamp_min(1e-6)
        block_likelihoods, indices[block] = matrix.topk(slots, dim=1)
        block_likelihoods[:, -1] = SCALE_TRICK
        likelihoods[block] = block_likelihoods / block_likelihoods.sum(dim=1, keepdim=True)
    return indices, likelihoods


def with_exact_names(student, teacher, indices, likelihoods):
    """Step 2: rows of tokens that show alike are that token alone."""
    indices, likelihoods = indices.clone(), likelihoods.clone()
    ids = teacher.get_vocab()
    for name, student_id in student.get_vocab().items():
        if name in ids:
            indices[student_id], likelihoods[student_id] = -1, 0
            indices[student_id, 0], likelihoods[student_id, 0] = ids[name], 1
    return indices, likelihoods


def sorted_and_cut(indices, likelihoods, slots, *, preserve_last=True):
    """Step 3: the largest entries of each row, and the old last slot again behind them."""
    cut_indices = torch.full((len(indices), slots), -1)
    cut_likelihoods = torch.zeros((len(indices), slots), dtype=likelihoods.dtype)
    for row in range(len(indices)):
        entries = [
            (p, i)
            for p, i in zip(likelihoods[row].tolist(), indices[row].tolist(), strict=True)
            if i != -1 and p > 0
        ]
        entries.sort(key=lambda entry: -entry[0])
        for slot, (p, i) in enumerate(entries[:slots]):
            cut_indices[row, slot], cut_likelihoods[row, slot] = i, p
        if preserve_last:
            cut_indices[row, -1] = indices[row, -1]
            cut_likelihoods[row, -1] = likelihoods[row, -1]
    total = cut_likelihoods.sum(dim=1, keepdim=True).clamp_min(1e-6)
    return cut_indices, cut_likelihoods / total


def default_file(student, teacher, slots=4, *, width=None):
    """What the three steps with default flags write.

    The first step leaves out the rows that the second overwrites.
    """
    names = teacher.get_vocab()
    rows = [i for name, i in student.get_vocab().items() if name not in names]
    prepared = prepared_table(student, teacher, rows=sorted(rows), width=width)
    indices, likelihoods = sorted_and_cut(
        *with_exact_names(student, teacher, *prepared), slots=slots
    )
    return {
        "indices": indices,
        "likelihoods": likelihoods,
        "student_model_id": "student",
        "teacher_model_id": "teacher",
        "enable_scale_trick": True,
    }


def leaked_share(content):
    """Of the rows that are not exact, the mass on the column of the last slot, and their ids."""
    indices, likelihoods = content["indices"], content["likelihoods"].double()
    rows = [row for row in range(len(indices)) if indices[row, -1] != -1]
    leaks = [
        float(likelihoods[row][indices[row] == indices[row, -1]].sum() / likelihoods[row].sum())
        for row in rows
    ]
    return sum(leaks) / len(leaks), rows
