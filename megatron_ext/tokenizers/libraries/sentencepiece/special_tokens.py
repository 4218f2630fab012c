"""The special tokens that a user names for a SentencePiece model."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from megatron_ext.errors import TokenizerError
from megatron_ext.registry import did_you_mean
from megatron_ext.tokenizers.libraries.token_names import distinct_names
from megatron_ext.tokenizers.special_names import CONVENTIONAL_NAMES, SpecialRole, names_to_add

SentencePieceRole = SpecialRole | Literal["eod"]

# Compared in lower case: Megatron before 0.16 wrote <CLS>, <SEP>, <EOD> and <MASK>.
_ROLE_OF: Mapping[str, SentencePieceRole] = {
    **{name.lower(): role for role, names in CONVENTIONAL_NAMES.items() for name in names},
    **dict.fromkeys(("<eod>", "[eod]", "<|eod|>"), "eod"),
}
_KEYS: Mapping[str, SentencePieceRole] = {f"{role}_token": role for role in _ROLE_OF.values()}


@dataclass(frozen=True, slots=True)
class GivenSpecialTokens:
    """Names in the order of their ids, and the roles that were said with them."""

    listed: tuple[str, ...]
    """The option ``special_tokens``."""
    additional: tuple[str, ...]
    """The options ``bos_token``, ``eos_token`` ... and ``additional_special_tokens``."""
    roles: Mapping[SentencePieceRole, str]
    """Name by role; a list of names says none."""

    @classmethod
    def of(
        cls,
        listed: Sequence[str] | Mapping[str, str] | None,
        additional: Sequence[str],
        roles: Mapping[SentencePieceRole, str | None],
    ) -> GivenSpecialTokens:
        """What the options say.

        Args:
            listed: Names, or names by ``bos_token``, ``eos_token``, ``eod_token`` ...
            additional: Names without a role.
            roles: Names by role; they win over ``listed``.

        Raises:
            TokenizerError: A key is no role, a list names a token twice, or a name is no text.
        """
        by_key = {f"{role}_token": name for role, name in roles.items() if name is not None}
        names = distinct_names(additional, "additional_special_tokens")
        if isinstance(listed, Mapping):
            _check_keys(listed)
            by_key = {**listed, **by_key}
            listed = list(dict.fromkeys(listed.values()))
        return cls(
            distinct_names(listed or (), "special_tokens"),
            distinct_names(names_to_add(roles, names), "special_tokens"),
            {_KEYS[key]: name for key, name in by_key.items()},
        )

    @property
    def names(self) -> tuple[str, ...]:
        """Every name, once."""
        return tuple(dict.fromkeys((*self.listed, *self.additional)))

    def without_role(self, with_role: Collection[int], processor: Any) -> list[str] | None:
        """Names whose ids are not among ``with_role``; None where nothing was named."""
        named = [name for name in self.names if processor.piece_to_id(name) not in with_role]
        return named if self.names else None

    def role_ids(self, processor: Any, control: Iterable[str]) -> dict[SentencePieceRole, int]:
        """Id of each role: as the user said, else as the model says, else by a usual name.

        Args:
            processor: SentencePiece's, to which all names are pieces.
            control: Names of all control pieces; usual names in ``listed`` count before these.
        """
        of_model: dict[SentencePieceRole, int] = {
            "bos": processor.bos_id(),
            "eos": processor.eos_id(),
            "pad": processor.pad_id(),
            "unk": processor.unk_id(),
        }
        ids = {role: token_id for role, token_id in of_model.items() if token_id >= 0}
        ids |= {role: processor.piece_to_id(name) for role, name in self.roles.items()}
        for name in (*self.listed, *control):
            role = _ROLE_OF.get(name.lower())
            if role is not None:
                ids.setdefault(role, processor.piece_to_id(name))
        return ids


def _check_keys(listed: Mapping[str, str]) -> None:
    for key in listed:
        if key not in _KEYS:
            raise TokenizerError(
                "no special token has this role",
                got=repr(key),
                expected=f"one of {', '.join(_KEYS)}",
                fix=did_you_mean(str(key), list(_KEYS)) or "use additional_special_tokens",
                where="special_tokens",
            )
