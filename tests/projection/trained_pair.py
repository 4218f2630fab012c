"""Two small byte-level vocabularies: the student reads numbers in threes, the teacher by digit."""

from tokenizers import Regex, pre_tokenizers

from tests.tokenizers.tokenizer_files import byte_level_bpe

SENTENCES = (
    "The projection maps every token of the student to tokens of the teacher.",
    "Years such as 2017 and 1984 are numbers, and so are prices: 201, 350 and 999.",
    "def spelled(token: bytes) -> list[int]: return [ids[piece] for piece in token]",
    "学生は先生から学びます。 Schöne Grüße aus Köln.",
    "Students and teachers differ in how they spell teaching, teacher and student.",
)
NUMBERS = " ".join(str(number) for number in range(100, 1000))
STUDENT_SPECIAL = ["<|begin_of_text|>", "<|end_of_text|>", "<|image_pad|>"]
TEACHER_SPECIAL = ["<|endoftext|>", "<|image_padding|>", "<|fim_middle|>"]


def trained(folder, name, size, digits, special, texts):
    split = pre_tokenizers.Split(Regex(digits), behavior="isolated")
    tokenizer = byte_level_bpe(texts, size, special, split=split)
    path = folder / name / "tokenizer.json"
    path.parent.mkdir()
    tokenizer.save(str(path))
    return tokenizer, path.parent


def trained_pair(folder):
    """(student, its folder), (teacher, its folder)"""
    more = " ".join(SENTENCES)
    return (
        trained(folder, "student", 1600, r"\d{1,3}", STUDENT_SPECIAL, [NUMBERS, *SENTENCES * 3]),
        trained(folder, "teacher", 520, r"\d", TEACHER_SPECIAL, [more, *SENTENCES[:3]]),
    )
