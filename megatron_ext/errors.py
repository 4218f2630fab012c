"""Errors for users: what failed, what was found, what was expected, and how to fix it."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import wraps
from typing import Any, Final, TypeVar

Class = TypeVar("Class")

_CONTROLS: Final = re.compile(
    "[\x00-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]"
)
"""Characters that a terminal obeys, that change the order of others, or that it cannot be sent."""

_HEAD: Final = 1300
_TAIL: Final = 600


def printable(text: str) -> str:
    """One line of at most 2,000 characters that a terminal shows and does not obey.

    Line ends become spaces and other control characters their escapes, as ``\\x1b``. Of a longer
    text, the middle is left out.
    """
    if len(text) > _HEAD + _TAIL:
        left_out = len(text) - _HEAD - _TAIL
        # Escapes are longer than what they stand for, so what stays is cut once more below.
        text = f"{text[:_HEAD]} [... {left_out:,} characters ...] {text[-_TAIL:]}"
    shown = escape_controls(text.replace("\n", " "))
    if len(shown) > 2000:
        shown = f"{shown[:_HEAD]} [...] {shown[-_TAIL:]}"
    return shown


def counted(number: int, noun: str) -> str:
    """A number of things in words, such as ``1 document`` or ``2,000 documents``."""
    plural = "es" if noun.endswith("ch") else "s"
    return f"{number:,} {noun}{'' if number == 1 else plural}"


def escape_controls(text: str, allowed: str = "") -> str:
    """``text`` with escapes in place of control characters other than those ``allowed``."""
    return _CONTROLS.sub(
        lambda found: found[0] if found[0] in allowed else repr(found[0])[1:-1], text
    )


class MegatronExtError(Exception):
    """Base of every error raised on purpose; its text is one line for a terminal (``printable``).

    Args:
        what: The failure, as a clause without a full stop.
        got: What was found.
        expected: What was expected.
        fix: What the user can do, as an imperative clause.
        where: File, ``file:line`` or configuration key of the failure.
    """

    where: object = None
    """The argument; lost when an error is sent to another process."""

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
        super().__init__(printable("; ".join(map(str, parts))))

    def __str__(self) -> str:
        return str(self.args[0])

    def __reduce__(self) -> tuple[object, ...]:
        # An error of one rank is pickled and raised on the others; only its text is sent.
        return _from_text, (type(self), str(self))


class ConfigError(MegatronExtError, ValueError):
    """A configuration key, flag or value that is invalid."""


class UnknownNameError(ConfigError, KeyError):
    """A name that a registry does not hold."""


class TokenizerError(MegatronExtError, ValueError):
    """A tokenizer file, or an argument of a tokenizer, that cannot be used."""


class ConversationError(MegatronExtError, ValueError):
    """A conversation that is malformed, or does not fit a prompt format or chat template."""


class UntrainedError(ConversationError):
    """A valid conversation in which no token is trained."""


class AlignmentError(MegatronExtError, ValueError):
    """Two tokenizations that do not cover the same bytes."""


class ProjectionError(MegatronExtError, ValueError):
    """A vocabulary projection that is malformed, corrupt or of another tokenizer pair."""


class LossError(MegatronExtError, ValueError):
    """Inputs that an objective cannot use."""


class DataError(MegatronExtError, ValueError):
    """A corpus that cannot be read or holds nothing to train on."""


class CheckpointError(MegatronExtError, RuntimeError):
    """A checkpoint that is missing, incomplete or of another model."""


class DistributedError(MegatronExtError, RuntimeError):
    """A rank that hangs, has exited, or was started differently from the others."""


class MissingDependencyError(MegatronExtError, ImportError):
    """An optional package that a feature needs and that is not installed."""

    def __init__(self, package: str, *, extra: str, feature: str) -> None:
        super().__init__(
            f"{feature} needs the package {package}, which is not installed",
            fix=f'run: pip install "megatron-ext[{extra}]"',
        )


def _from_text(kind: type[MegatronExtError], text: str) -> MegatronExtError:
    return kind.__new__(kind, text)


@contextmanager
def refused_input(what: str, **parts: Any) -> Iterator[None]:
    """Turn whatever a block raises, while it reads an input, into one line that names the input.

    Args:
        what: As in ``MegatronExtError``.
        parts: ``where``, ``expected`` and ``fix``, and ``kind``, the class of the error.

    Raises:
        MegatronExtError: Of the class ``kind``, or as it was raised.
    """
    kind = parts.pop("kind", DataError)
    try:
        yield
    except (MegatronExtError, ImportError):
        raise
    except BaseException as error:
        # A panic of a library in Rust is no Exception.
        if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
            raise
        reason = error.strerror if isinstance(error, OSError) else None
        got = reason or f"{type(error).__name__}: {error}"
        raise kind(what, got=got, **parts) from error


@contextmanager
def refused_by_system(what: str, **parts: Any) -> Iterator[None]:
    """Turn an ``OSError`` of a block into one line that names its file; see ``refused_input``."""
    kind = parts.pop("kind", DataError)
    try:
        yield
    except OSError as error:
        raise kind(what, got=error.strerror or error, **parts) from error


def arguments_elsewhere(
    instead: Mapping[str, str], *, project: str, positional: str | None = None
) -> Callable[[type[Class]], type[Class]]:
    """Decorate a class so that arguments of another project's class of this name say what to pass.

    All other arguments reach the constructor as they are.

    Args:
        instead: Keyword of the other class -> what takes its place here.
        project: The other project.
        positional: What takes the place of positional arguments; None: this class has some too.

    Raises:
        ConfigError: By the decorated class, for arguments of the other one.
    """

    def decorated(cls: type[Class]) -> type[Class]:
        construct: Callable[..., None] = vars(cls)["__init__"]

        @wraps(construct)
        def refusing(self: Class, *args: Any, **kwargs: Any) -> None:
            advice = {f"{name}=": instead[name] for name in kwargs if name in instead}
            if args and positional is not None:
                advice = {f"positional {type(args[0]).__name__}": positional} | advice
            if advice:
                raise ConfigError(
                    f"{project}'s class of this name has other arguments than this one",
                    got=", ".join(advice),
                    fix="; ".join(
                        f"{', '.join(name for name in advice if advice[name] == text)} {text}"
                        for text in dict.fromkeys(advice.values())
                    ),
                    where=cls.__name__,
                )
            construct(self, *args, **kwargs)

        # Assigned by name: mypy holds a constructor to be no attribute.
        setattr(cls, "__init__", refusing)  # noqa: B010
        return cls

    return decorated
