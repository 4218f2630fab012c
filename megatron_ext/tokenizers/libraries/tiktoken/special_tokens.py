"""Which special tokens of a tiktoken vocabulary have a role."""

from __future__ import annotations

from collections.abc import Mapping

from megatron_ext.errors import TokenizerError
from megatron_ext.tokenizers.libraries.tiktoken.layout import TiktokenOptions, TiktokenVocabulary
from megatron_ext.tokenizers.special_names import CONVENTIONAL_NAMES, SpecialRole


def role_ids(
    vocabulary: TiktokenVocabulary,
    options: TiktokenOptions,
    roles: Mapping[SpecialRole, str | None],
) -> dict[SpecialRole, int | None]:
    """Id of each role: as an option says, else of its usual name.

    Raises:
        TokenizerError: Several special tokens that the user listed have usual names of a role.
    """
    names = vocabulary.special_ids.keys() - vocabulary.added
    ids: dict[SpecialRole, int | None] = {}
    for role, usual in CONVENTIONAL_NAMES.items():
        said = roles[role]
        if said is not None:
            ids[role] = vocabulary.special_ids[said]
            continue
        known = [name for name in usual if name in names]
        # Megatron's own name, which comes first, leaves no doubt.
        if options.special_tokens is not None and len(known) > 1 and known[0] != usual[0]:
            raise TokenizerError(
                f"several special tokens could be the {role} token",
                got=" and ".join(map(repr, known)),
                fix=f"say which: {role}_token={known[0]!r}",
                where="special_tokens",
            )
        ids[role] = vocabulary.special_ids[known[0]] if known else None
    return ids


def without_role(
    vocabulary: TiktokenVocabulary,
    options: TiktokenOptions,
    role_ids: Mapping[SpecialRole, int | None],
) -> list[str] | None:
    """Special tokens that the user named and that have no role; None where he named none."""
    named = list(dict.fromkeys((*(options.special_tokens or ()), *options.additional)))
    if not named:
        return None
    used = vocabulary.special_ids.keys() - vocabulary.fillers
    with_role = set(role_ids.values())
    return [n for n in named if n in used and vocabulary.special_ids[n] not in with_role]
