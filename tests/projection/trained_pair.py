"""Two small byte-level vocabularies: the student reads numbers in threes, the teacher by digit."""

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

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
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(digits), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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
