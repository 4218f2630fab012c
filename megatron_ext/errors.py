"""Errors for users: what failed, what was found, what was expected, and how to fix it."""


class MegatronExtError(Exception):
    """Base of every error raised on purpose; its text is one line for a terminal.

    Args:
        what: The failure, as a clause without a full stop.
        got: What was found.
        expected: What would have been right.
        fix: What the user can do, as an imperative clause.
        where: File, ``file:line`` or configuration key the failure is about.
    """

    where: object = None
    """As it was given; lost where an error passes from one process to another."""

    def __init__(
        self,
        what: str,
        *,
        got: object = None,
        expected: object = None,
        fix: str | None = None,
        where: object = None,
    ) -> None:
        parts = [what if where is None else f"{where}: {what}"]
        if got is not None:
            parts.append(f"got {got}")
        if expected is not None:
            parts.append(f"expected {expected}")
        if fix is not None:
            parts.append(fix)
        self.where = where
        super().__init__("; ".join(str(part).replace("\n", " ") for part in parts))

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        # An error of one rank is pickled and raised on the others, whatever made its text.
        return _from_text, (type(self), str(self))


class ConfigError(MegatronExtError, ValueError):
    """A configuration key, flag or value that cannot be used."""


class UnknownNameError(ConfigError, KeyError):
    """A name that a registry does not hold."""


class TokenizerError(MegatronExtError, ValueError):
    """A tokenizer file, or a request to a tokenizer, that cannot be honoured."""


class ConversationError(MegatronExtError, ValueError):
    """A conversation that is malformed, or that a prompt format or chat template cannot take."""


class UntrainedError(ConversationError):
    """A conversation in which nothing is trained, though nothing is wrong with it."""


class AlignmentError(MegatronExtError, ValueError):
    """Two tokenizations that do not cover the same bytes."""


class ProjectionError(MegatronExtError, ValueError):
    """A vocabulary projection that is malformed, corrupt or made for another pair."""


class LossError(MegatronExtError, ValueError):
    """Inputs that an objective cannot use."""


class DataError(MegatronExtError, ValueError):
    """A corpus that cannot be read or holds nothing to train on."""


class CheckpointError(MegatronExtError, RuntimeError):
    """A checkpoint that is missing, incomplete or of another model."""


class DistributedError(MegatronExtError, RuntimeError):
    """A rank that is stuck, gone, or was started otherwise than the others."""


class MissingDependencyError(MegatronExtError, ImportError):
    """An optional package that this feature needs is not installed."""

    def __init__(self, package: str, *, extra: str, feature: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed",
            fix=f'run: pip install "megatron-ext[{extra}]"',
        )


def _from_text(kind: type[MegatronExtError], text: str) -> MegatronExtError:
    return kind.__new__(kind, text)
