"""Place and step of a capture: written by one process, read by another."""

from __future__ import annotations

import pytest

from verl_profiler_conf.core.place import Place, label_of, step_of


@pytest.mark.parametrize("place", [Place(0), Place(3, 12, "10.0.0.7")])
def test_a_place_comes_back_the_same(place: Place) -> None:
    assert Place.from_json(place.to_json()) == place


@pytest.mark.parametrize(
    "text", [None, "", "x", "3", "[]", "{}", '{"replica": "0"}', '{"replica": 0, "node": 3}', '{"replica": 0, "x": 1}']
)
def test_what_is_no_place_says_nothing(text: str | None) -> None:
    assert Place.from_json(text) is None


def test_a_step_is_read_out_of_its_label() -> None:
    assert step_of(label_of(12, 3)) == 12


@pytest.mark.parametrize("label", [None, "", "mine", "step3", "step3_replica", "x_step3_replica0"])
def test_another_label_names_no_step(label: str | None) -> None:
    assert step_of(label) is None
