from dataclasses import dataclass, field
from typing import Literal

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.model_section import read_config_file
from megatron_ext.typed_mapping import build_config


@dataclass(kw_only=True, frozen=True)
class Inner:
    rate: float = 0.5
    count: int = 1

    def __post_init__(self):
        if self.count < 0:
            raise ConfigError("count must not be negative", got=self.count)


@dataclass(kw_only=True, frozen=True)
class Outer:
    name: str
    inner: Inner = field(default_factory=Inner)
    extra: Inner | None = None
    files: tuple[str, ...] = ()
    shape: Literal["round", "square"] = "round"
    is_on: bool = True
    limit: int | None = None


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.yaml"


def build(file, text):
    file.write_text(text, encoding="utf-8")
    return build_config(Outer, *read_config_file(file))


def refusal(file, text):
    with pytest.raises(ConfigError) as caught:
        build(file, text)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sections_nest_and_what_is_left_out_has_its_default(file):
    assert build(file, "name: a\nextra:\n  count: 3\n") == Outer(name="a", extra=Inner(count=3))


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("inner: {rate: 1e-4}", "inner", Inner(rate=1e-4)),
        ("inner: {rate: 2}", "inner", Inner(rate=2.0)),
        ("limit: 0", "limit", 0),
        ("limit:", "limit", None),
        ("files: [a, b]", "files", ("a", "b")),
        ("files: a", "files", ("a",)),
        ("is_on: no", "is_on", False),
        ("shape: square", "shape", "square"),
        ("extra:", "extra", None),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_value_is_read_as_the_type_of_its_field(file, text, key, value):
    read = getattr(build(file, f"name: a\n{text}\n"), key)
    assert read == value
    assert type(read) is type(value)


def test_an_integer_given_for_a_float_becomes_one(file):
    assert type(build(file, "name: a\ninner: {rate: 2}\n").inner.rate) is float


@pytest.mark.parametrize(
    ("text", "place", "words"),
    [
        ("limit: 1.5", ":2: limit", "got 1.5; expected int"),
        ("limit: true", ":2: limit", "got True; expected int"),
        ("limit: '3'", ":2: limit", "got '3'; expected int"),
        ("inner:\n  rate: fast", ":3: inner.rate", "got 'fast'; expected float"),
        ("inner:\n  rate: true", ":3: inner.rate", "got True; expected float"),
        ("is_on: 1", ":2: is_on", "got 1; expected bool"),
        ("shape: oval", ":2: shape", "got 'oval'; expected one of round, square"),
        ("files: [a, 3]", ":2: files", "got ['a', 3]; expected a list of str"),
        ("files: {a: b}", ":2: files", "expected a list of str"),
    ],
    ids=lambda value: value.replace("\n", "") if isinstance(value, str) else "",
)
def test_a_value_of_another_type_is_refused_with_its_line(file, text, place, words):
    message = refusal(file, f"name: a\n{text}\n")
    assert message.startswith(f"{file}{place}: a value has the wrong type; ")
    assert words in message


@pytest.mark.parametrize("section", ["inner", "extra"])
@pytest.mark.parametrize("text", ["3", "[a]", "text"])
def test_a_section_that_is_no_mapping_is_refused(file, section, text):
    message = refusal(file, f"name: a\n\n{section}: {text}\n")
    assert message.startswith(f"{file}:3: {section}: a section is not a mapping; got ")


def test_an_unknown_key_is_refused_with_its_line_the_choices_and_the_nearest(file):
    assert refusal(file, "name: a\ninner:\n  # a comment\n  cuont: 3\n") == (
        f"{file}:4: inner.cuont: unknown configuration key; expected one of rate, count; "
        "did you mean 'count'?"
    )


def test_a_key_that_is_no_text_is_refused(file):
    assert refusal(file, "name: a\n3: b\n").startswith(f"{file}:2: 3: unknown configuration key")


def test_a_missing_key_is_refused_by_name(file):
    message = refusal(file, "shape: round\n")
    assert message.startswith(f"{file}: a required configuration key is missing; expected name")


def test_what_a_section_itself_refuses_carries_the_line_of_the_section(file):
    message = refusal(file, "name: a\ninner:\n  count: -1\n")
    assert message == f"{file}:2: inner: count must not be negative; got -1"


def test_a_key_given_twice_is_refused_with_both_lines(file):
    message = refusal(file, "name: a\ninner:\n  count: 1\n  rate: 1\n  count: 2\n")
    assert message.startswith(f"{file}:5: inner.count: the key is given twice; got it in line 3")


@pytest.mark.parametrize(
    ("text", "line"),
    [("name: a\ninner: [1\n", ":3"), ("name: a\n\tinner: 1\n", ":2"), ("a: b: c\n", ":1")],
    ids=["open-list", "tab", "two-colons"],
)
def test_what_is_no_yaml_is_refused_with_its_line(file, text, line):
    assert refusal(file, text).startswith(f"{file}{line}: the configuration file is not valid YAML")


def test_bytes_that_are_no_text_are_refused(file):
    file.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match=r"not valid YAML; got .*utf-8"):
        read_config_file(file)


@pytest.mark.parametrize("text", ["", "- a\n", "text\n", "3\n"], ids=repr)
def test_a_file_that_is_no_mapping_is_refused(file, text):
    assert "not a mapping of keys to values" in refusal(file, text)


def test_a_file_that_is_not_there_is_refused(file):
    with pytest.raises(ConfigError, match="cannot be read; got No such file"):
        read_config_file(file)
