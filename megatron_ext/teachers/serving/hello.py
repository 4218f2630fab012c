"""What a server says of itself first, and what a student makes of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from megatron_ext.errors import ConfigError
from megatron_ext.teachers.serving.protocol import PROTOCOL
from megatron_ext.teachers.targets.form import TargetForm


@dataclass(frozen=True, slots=True, kw_only=True)
class Hello:
    """A teacher that is served."""

    teacher: str
    """Its name where it runs."""

    form: TargetForm

    identity: Mapping[str, str | int]
    """What its targets depend on, by what it is called in an error."""

    protocol: int = PROTOCOL

    def values(self) -> dict[str, Any]:
        """Plain values."""
        return {
            "protocol": self.protocol,
            "teacher": self.teacher,
            "form": self.form.values(),
            "identity": dict(self.identity),
        }

    @classmethod
    def of(cls, values: Mapping[str, Any], *, where: str) -> Hello:
        """From plain values.

        Raises:
            ConfigError: They are of another version of the protocol.
        """
        if values.get("protocol") != PROTOCOL:
            raise ConfigError(
                "the teacher's server speaks another version of the protocol",
                where=where,
                got=values.get("protocol"),
                expected=PROTOCOL,
                fix="run the same version of megatron-ext on both sides",
            )
        return cls(
            teacher=str(values["teacher"]),
            form=TargetForm(**values["form"]),
            identity=dict(values["identity"]),
        )

    def check(
        self, *, form: TargetForm, identity: Mapping[str, str | int], name: str, where: str
    ) -> None:
        """Check that this is the teacher that a run means.

        Args:
            form: What the run reads.
            identity: What must be the same, by name; a server may know more.
            name: Of the teacher in the run.
            where: The server's address.

        Raises:
            ConfigError: Something is not the same.
        """
        differences = [
            (f"another {key}", self.identity.get(key), value) for key, value in identity.items()
        ]
        differences += [
            ("another vocabulary", self.form.vocab_size, form.vocab_size),
            ("targets of another form", str(self.form), str(form)),
        ]
        for what, got, expected in differences:
            if got != expected:
                raise ConfigError(
                    f"the server of teacher {name} has {what}",
                    where=where,
                    got=_short(got),
                    expected=_short(expected),
                    fix="start the server with the configuration of this run",
                )


def _short(value: object) -> str:
    """A value without the rest of a hash."""
    text = "none" if value is None else str(value)
    is_hash = len(text) >= 40 and all(digit in "0123456789abcdef" for digit in text)
    return text[:12] if is_hash else text
