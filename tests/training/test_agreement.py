"""Agreement is the share of one-to-one chunks in which both models choose the same token."""

import pytest
import torch

from megatron_ext.tokenizers import TokenizerConfig, build_tokenizer
from megatron_ext.training.validation import same_tokens
from tests.huggingface.tiny_models import save_tokenizer
from tests.process_group import run_ranks
from tests.training.agreement_ranks import ROWS, STUDENT_V, TEACHER_V, case, measure


@pytest.fixture(scope="module")
def ranks():
    return run_ranks(2, measure)


def plain():
    """By the definition, chunk by chunk."""
    given, agreeing, chunks = case(), 0, 0
    for row in range(ROWS):
        for chunk in set(given["student_ids"][row].tolist()) - {-1}:
            student = (given["student_ids"][row] == chunk).nonzero().flatten().tolist()
            teacher = (given["teacher_ids"][row] == chunk).nonzero().flatten().tolist()
            if (len(student), len(teacher)) != (1, 1):
                continue
            chosen = int(given["student_logits"][row, student[0], :STUDENT_V].argmax())
            taught = int(given["teacher_logits"][row, teacher[0], :TEACHER_V].argmax())
            agreeing += int(given["same_tokens"][chosen]) == taught
            chunks += 1
    return agreeing / chunks, chunks


@pytest.mark.parametrize("axis", ["vocabulary", "sequence", "rows"])
def test_every_layout_counts_what_the_definition_does(ranks, axis):
    share, chunks = plain()
    assert 0 < share < 1
    for rank in ranks:
        assert rank[axis] == (share, chunks)


def test_no_chunk_has_no_share(ranks):
    assert ranks[0]["none"] == (None, 0)


def test_same_tokens_have_the_same_bytes_or_role(tmp_path):
    texts = {"student": "a question of the weather", "teacher": "the theory of other things"}
    controls = {"student": ["</s>", "<s>", "<pad>", "<own>"], "teacher": ["<pad>", "<s>", "</s>"]}
    for side, text in texts.items():
        save_tokenizer(tmp_path / side, text=text, control_tokens=[*controls[side]])
    student, teacher = (
        build_tokenizer(TokenizerConfig(model=str(tmp_path / side))) for side in texts
    )
    table = same_tokens(student, teacher, device=torch.device("cpu")).tolist()
    assert table[:4] == [2, 1, 0, -1]
    by_bytes = {teacher.token_bytes(i): i for i in range(3, teacher.vocab_size)}
    expected = [by_bytes.get(student.token_bytes(i), -1) for i in range(4, student.vocab_size)]
    assert table[4:] == expected
    assert len(set(expected)) > 256
    assert -1 in expected
    assert same_tokens(student, student, device=torch.device("cpu")).tolist() == list(
        range(student.vocab_size)
    )
