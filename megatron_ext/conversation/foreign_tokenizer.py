"""Tokenizers of other packages where one of ours is needed."""

from __future__ import annotations

from megatron_ext.errors import TokenizerError


def refuse_foreign(tokenizer: object, method: str) -> None:
    """Refuse what is no tokenizer of ours, such as one of transformers or a path.

    Args:
        tokenizer: What a caller passed.
        method: A method that every tokenizer of ours has at this place.

    Raises:
        TokenizerError: ``tokenizer`` does not have it.
    """
    if hasattr(tokenizer, method):
        return
    kind = type(tokenizer)
    named = tokenizer if isinstance(tokenizer, str) else getattr(tokenizer, "name_or_path", None)
    call = "MegatronTokenizer.from_pretrained"
    raise TokenizerError(
        "this is no tokenizer of megatron_ext",
        got=f"{kind.__module__.partition('.')[0]}.{kind.__qualname__}",
        expected=f"what {call} returns",
        fix=f"pass {call}({named!r})" if named else f"call {call} with the folder of its files",
    )
