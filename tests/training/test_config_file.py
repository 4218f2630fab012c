from dataclasses import dataclass, field
from typing import Literal

import pytest

from megatron_ext.errors import ConfigError
from megatron_ext.training.configuration.yaml_file import read_config_file
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
    note: str | None = None
    rates: tuple[float, ...] = ()


@pytest.fixture
def file(tmp_path):
    return tmp_path / "run.yaml"


def build(file, text):
    file.write_text(text, encoding="utf-8")
    return build_config(Outer, *read_config_file(file))


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
        ("rates: [1, 1e-4, 0.5]", "rates", (1.0, 1e-4, 0.5)),
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
    if isinstance(value, Inner):
        assert type(read.rate) is float


WRONG = "a value has the wrong type; got"
NO_SECTION = "a section is not a mapping; got"
NO_YAML = "the configuration file is not valid YAML"
NO_KEYS = "the configuration file is not a mapping of keys to values"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("name: a\nlimit: 1.5", f":2: limit: {WRONG} 1.5; expected int"),
        ("name: a\nlimit: true", f":2: limit: {WRONG} True; expected int"),
        ("name: a\nlimit: '3'", f":2: limit: {WRONG} '3'; expected int"),
        ("name: a\ninner:\n  rate: fast", f":3: inner.rate: {WRONG} 'fast'; expected float"),
        ("name: a\ninner:\n  rate: true", f":3: inner.rate: {WRONG} True; expected float"),
        ("name: a\nis_on: 1", f":2: is_on: {WRONG} 1; expected bool"),
        (
            "name: a\nshape: oval",
            ":2: shape: there is no such choice; got 'oval'; expected one of round, square",
        ),
        (
            "name: a\nfiles: [a, 3]",
            f":2: files: {WRONG} ['a', 3]; expected a list of str; put into quotes",
        ),
        ("name: 2026-01-01", f":1: name: {WRONG} datetime.date(2026, 1, 1); expected str; put"),
        ("name: a\nnote: ''", ":2: note: a value is empty; leave it out"),
        ("name: a\nrates: [1, x]", f":2: rates: {WRONG} 'x'; expected float"),
        ("name: a\ninner:\n  rate: .inf", f":3: inner.rate: {WRONG} inf; expected a finite number"),
        ("name: a\nfiles: {a: b}", f":2: files: {WRONG} {{'a': 'b'}}; expected a list of str"),
        *(
            (f"name: a\n\n{section}: {text}", f":3: {section}: {NO_SECTION} ")
            for section in ("inner", "extra")
            for text in ("3", "[a]", "text")
        ),
        (
            "name: a\ninner:\n  # a comment\n  cuont: 3",
            ":4: inner.cuont: unknown configuration key; did you mean 'count'?",
        ),
        ("name: a\ninner:\n  zzz: 3", ":3: inner.zzz: unknown configuration key; expected one of "),
        ("name: a\n3: b", ":2: 3: unknown configuration key"),
        ("shape: round", ": a required configuration key is missing; expected name"),
        # What a section itself refuses carries its line.
        ("name: a\ninner:\n  count: -1", ":2: inner: count must not be negative; got -1"),
        (
            "name: a\ninner:\n  count: 1\n  rate: 1\n  count: 2",
            ":5: inner.count: the key is given twice; got it in line 3",
        ),
        ("name: a\ninner: [1", f":3: {NO_YAML}"),
        ("name: a\n\tinner: 1", f":2: {NO_YAML}"),
        ("a: b: c", f":1: {NO_YAML}"),
        ("", f": {NO_KEYS}"),
        ("- a", f": {NO_KEYS}"),
        ("text", f": {NO_KEYS}"),
        ("3", f": {NO_KEYS}"),
    ],
    ids=lambda value: value.replace("\n", " ")[:50],
)
def test_what_cannot_be_read_is_refused_with_its_line(file, text, message):
    with pytest.raises(ConfigError) as caught:
        build(file, f"{text}\n")
    assert str(caught.value).startswith(f"{file}{message}")
    assert "\n" not in str(caught.value)


def test_bytes_that_are_no_text_and_a_file_that_is_not_there_are_refused(file):
    with pytest.raises(ConfigError, match="cannot be read; got No such file"):
        read_config_file(file)
    file.write_bytes(b"name: \xff\n")
    with pytest.raises(ConfigError, match=r"not valid YAML; got .*utf-8"):
        read_config_file(file)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [*a{i}, *a{i}]\n" for i in range(40)),
            "too",
        ),
        ("a: &a\n  b: *a\n", "too many values"),
        ("a: " + "[" * 5000, "nested too deeply"),
        ("a: " + "1" * 5000, "not valid YAML"),
    ],
    ids=["aliases", "holds itself", "depth", "digits"],
)
def test_a_few_lines_that_stand_for_very_much_are_refused(file, text, message):
    file.write_text(text)
    with pytest.raises(ConfigError, match=message):
        read_config_file(file)


def test_a_path_from_the_users_folder_is_found_there(file, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    read = build(file, "name: ~/runs\nfiles: [~/a, b~/c, ~other/d]\n")
    assert read == Outer(name="/home/me/runs", files=("/home/me/a", "b~/c", "~other/d"))
