import pytest

from megatron_ext.errors import ConfigError, UnknownNameError
from megatron_ext.registry import Registry, did_you_mean


@pytest.fixture
def colours():
    registry = Registry("colour")
    registry.register("green", 0)
    registry.register("red", 1)
    return registry


def test_rows_are_found_by_name_in_the_order_they_were_registered(colours):
    assert dict(colours) == {"green": 0, "red": 1}
    assert list(colours) == ["green", "red"]


def test_register_returns_its_row(colours):
    assert colours.register("blue", 7) == 7
    assert colours["blue"] == 7


def test_an_unknown_name_lists_the_choices_and_the_nearest(colours):
    with pytest.raises(UnknownNameError) as caught:
        colours["gren"]
    assert str(caught.value) == (
        "unknown colour; got 'gren'; expected one of green, red; did you mean 'green'?"
    )


def test_an_unknown_name_is_a_key_error_so_that_mapping_methods_work(colours):
    assert colours.get("mauve") is None
    assert "mauve" not in colours


def test_assigning_to_a_name_registers_it(colours):
    colours["blue"] = 7
    assert list(colours.items())[-1] == ("blue", 7)


def test_a_name_cannot_be_taken_twice(colours):
    with pytest.raises(ConfigError, match="the colour 'red' is registered already"):
        colours.register("red", 2)
    with pytest.raises(ConfigError, match="the colour 'red' is registered already"):
        colours["red"] = 2
    assert colours["red"] == 1


@pytest.mark.parametrize(
    ("name", "answer"),
    [("lr_", "did you mean 'lr'?"), ("zzzz", None), (3, None)],
    ids=["near", "far", "no-text"],
)
def test_did_you_mean_names_only_what_is_near(name, answer):
    assert did_you_mean(name, ["lr", "seed"]) == answer
