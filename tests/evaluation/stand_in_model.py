"""A ``LanguageModel`` that answers by rule, to test tasks without a model."""

from typing import TypeVar

from megatron_ext.evaluation.language_model import GenerationOptions, LogLikelihood
from megatron_ext.tokenizers import MegatronTokenizerText, TokenizerConfig, build_tokenizer

Result = TypeVar("Result")


class StandInModel:
    """Likes tokens by their text; completes prompts by a function; remembers what it was asked."""

    adds_bos = False
    applies_chat_template = False

    def __init__(
        self,
        *,
        nats=lambda context, text: -float(len(text)),
        complete=lambda prompt: "",
        max_length=10000,
    ):
        self.tokenizer: MegatronTokenizerText = build_tokenizer(
            TokenizerConfig(library="byte-level", vocab_size=512)
        )
        self.max_length = max_length
        self.prompts: list[str] = []
        self.options: GenerationOptions | None = None
        self._nats = nats
        self._complete = complete

    def log_likelihoods(self, requests):
        """By the rule."""
        texts = [tuple(map(self.tokenizer.detokenize, request)) for request in requests]
        return [LogLikelihood(self._nats(*pair), True) for pair in texts]

    def generate(self, prompts, options):
        """By the rule."""
        self.prompts, self.options = list(prompts), options
        return [self._complete(prompt) for prompt in prompts]

    def once(self, work):
        """Here."""
        return work()


def written(path, text):
    """A file with its folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path
