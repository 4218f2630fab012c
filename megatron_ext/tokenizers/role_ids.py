"""Special ids by the names that Megatron's code has for their roles."""

from __future__ import annotations

from abc import ABC, abstractmethod

from megatron_ext.tokenizers.special_names import SpecialRole


class RoleIds(ABC):
    """What ``special_id`` gives, a property for each role but the padding."""

    @abstractmethod
    def special_id(self, role: SpecialRole) -> int | None:
        """Id of the special token of a role; None where the tokenizer has none."""

    @property
    def bos_id(self) -> int | None:
        """Beginning of sequence."""
        return self.special_id("bos")

    @property
    def eos_id(self) -> int | None:
        """End of sequence."""
        return self.special_id("eos")

    @property
    def unk_id(self) -> int | None:
        """Unknown."""
        return self.special_id("unk")

    @property
    def mask_id(self) -> int | None:
        """Masked position."""
        return self.special_id("mask")

    @property
    def cls_id(self) -> int | None:
        """Classification."""
        return self.special_id("cls")

    @property
    def sep_id(self) -> int | None:
        """Separator."""
        return self.special_id("sep")
