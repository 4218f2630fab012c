"""The default recipe of the x-token tools, in plain dense steps, to make files as they make them.

Written from a description of what those tools do: NeMo RL at 7ea279ab, tools/x_token. It shares
nothing with what it tests but the tokenizer files.
"""

import difflib
import re

import torch

PIECES = 4
PREPARED_SLOTS = 32
SCALE_TRICK = 0.2


def decay(ids):
    weights = [0.9 * 0.1**place for place in range(len(ids))]
    return [weight / sum(weights) for weight in weights]


def is_left_out(name):
    return name in ("<|endoftext|>", "<eos>") or re.fullmatch(r"<\|.*\|>", name) is not None


def add_spellings(counts, source, target, *, reverse):
    names = [source.id_to_token(i) for i in range(source.get_vocab_size())]
    for token_id, name in enumerate(names):
        if is_left_out(name):
            continue
        text = source.decode([token_id], skip_special_tokens=False)
        pieces = target.encode(text, add_special_tokens=False).ids[:PIECES]
        for piece, weight in zip(pieces, decay(pieces), strict=True):
            counts[(piece, token_id) if reverse else (token_id, piece)] += weight


def words(name):
    return {word for word in re.findall(r"[a-z]+", name.lower()) if len(word) > 2}


def similarity(first, second):
    both, either = words(first) & words(second), words(first) | words(second)
    jaccard = len(both) / len(either) if either else 0.0
    return 0.6 * difflib.SequenceMatcher(None, first, second).ratio() + 0.4 * jaccard


def add_special_tokens(counts, student, teacher):
    for name, student_id in student.get_vocab().items():
        for other, teacher_id in teacher.get_vocab().items():
            if re.fullmatch("<.+>", name) and re.fullmatch("<.+>", other):
                alike = similarity(name, other)
                if alike >= 0.3:
                    counts[student_id, teacher_id] += 0.8 * alike


def prepared_table(student, teacher, slots=PREPARED_SLOTS):
    """Step 1: indices and likelihoods [Vs, slots], the last slot overwritten."""
    counts = torch.zeros(student.get_vocab_size(), teacher.get_vocab_size())
    add_spellings(counts, student, teacher, reverse=False)
    add_spellings(counts, teacher, student, reverse=True)
    add_special_tokens(counts, student, teacher)
    matrix = counts.to(torch.bfloat16)
    matrix = matrix / matrix.sum(dim=1, keepdim=True).clamp_min(1e-6)
    likelihoods, indices = matrix.topk(slots, dim=1)
    likelihoods[:, -1] = SCALE_TRICK
    return indices, likelihoods / likelihoods.sum(dim=1, keepdim=True)


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


def default_file(student, teacher, slots=4):
    """What the three steps with default flags write."""
    prepared = prepared_table(student, teacher)
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
