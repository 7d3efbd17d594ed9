"""What is a window and what is refused, for everything that a user can type."""

from __future__ import annotations

import contextlib
import json
import pickle
from pathlib import Path
from typing import Any

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from hypothesis import example, given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from omegaconf.errors import ValidationError

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow, parse_windows
from verl_profiler_conf.launch.checking import validate
from verl_profiler_conf.schema.options import TorchWindow

CASES = {case["id"]: case for case in json.loads((Path(__file__).parent / "cases.json").read_text())}

PLAIN = {
    "window-basic": [(12, 46)],
    "window-from-zero": [(0, 1)],
    "window-end-only": [(0, 80)],
    "window-start-only": [(40, None)],
    "windows-two": [(0, 4), (100, 104)],
}
"""Case -> the windows that it means."""

REFUSED = {
    "window-end-zero": "profile_token_end=0: an empty window; the end is exclusive, so it must be at least 1",
    "window-reversed": "profile_token_end=3: an empty window; must be greater than profile_token_start=5",
    "window-bool": "profile_token_start=True: must be an integer from 0 to 2147483647, or null",
    "window-float": "profile_token_start=3.0: must be an integer from 0 to 2147483647, or null",
    "window-huge": f"profile_token_end={10**30}: must be an integer from 0 to 2147483647, or null",
    "window-negative": "profile_token_start=-1: must be an integer from 0 to 2147483647, or null",
    "windows-overlap": (
        "profile_token_windows=[[0, 20], [10, 30]]: windows must not overlap: [0] [0, 20) and [1] [10, 30)"
    ),
}
"""Case -> all that a user reads."""


def given_by(case: str) -> dict[str, Any]:
    """A case's settings as the command line makes them: `true` and `3.0` are a bool and a float there."""
    written = {"true": True, "3.0": 3.0}
    return {key: written[value] if isinstance(value, str) else value for key, value in CASES[case]["given"].items()}


def parse(raw: dict[str, Any], prefix: str = "") -> tuple[TokenWindow, ...]:
    names = ("profile_token_start", "profile_token_end", "profile_token_windows")
    return parse_windows(*(raw.get(name) for name in names), prefix=prefix)


@pytest.mark.parametrize("case", PLAIN)
def test_case_is_a_window(case: str) -> None:
    assert [(window.start, window.end) for window in parse(given_by(case))] == PLAIN[case]


@pytest.mark.parametrize("case", REFUSED)
def test_case_is_refused(case: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse(given_by(case))
    assert str(refused.value) == REFUSED[case]


def test_every_case_of_a_window_is_here() -> None:
    windows = {name for name in CASES if name.startswith("window")}
    assert windows == {*PLAIN, *REFUSED, "window-interpolated"}  # interpolation needs a config: tests/unit/schema


# -- properties --------------------------------------------------------------------------------------------------------

typed_numbers = st.one_of(
    st.integers(-5, 200),
    st.integers(),
    st.sampled_from([MAX_TOKEN - 1, MAX_TOKEN, MAX_TOKEN + 1, 10**30, -(10**30)]),
    st.floats(),
    st.booleans(),
    st.complex_numbers(),
    st.decimals(),
)
typed_texts = st.one_of(
    st.text(),
    st.sampled_from(["12", " 5 ", "1_000", "0x10", "1e3", "", "null", "None", "30:60", "½", "٣", "true", "4.0"]),
    st.binary(),
)
anything = st.one_of(
    st.none(), typed_numbers, typed_texts, st.lists(st.integers(), max_size=3), st.dictionaries(st.text(), st.none())
)


def is_token(value: object) -> bool:
    return type(value) is int and 0 <= value < 2**31


@given(start=anything, end=anything)
@example(start=None, end=None)
@example(start=10**5000, end=None)
@settings(max_examples=400)
def test_two_settings_are_a_window_or_refused(start: object, end: object) -> None:
    """Nothing is clamped: what is accepted stands in the window as it was given."""
    usable = (start is None or is_token(start)) and (end is None or is_token(end))
    if usable and (end is None or end > (start or 0)):  # type: ignore[operator]
        assert parse_windows(start, end, []) == (TokenWindow(start or 0, end),)  # type: ignore[arg-type]
        return
    with pytest.raises(ConfigError) as refused:
        parse_windows(start, end, [], prefix="train.prof.")
    error = refused.value
    assert error.key in ("train.prof.profile_token_start", "train.prof.profile_token_end")
    assert error.value is (start if error.key.endswith("start") else end) or error.value == end
    assert str(error).startswith(f"{error.key}=")
    assert error.allowed
    assert str(error).endswith(error.allowed)
    assert len(str(error).splitlines()) == 1
    assert len(str(error)) < 400


pair = st.tuples(st.one_of(st.none(), st.integers(-1, 60)), st.one_of(st.none(), st.integers(-1, 60)))


@given(pairs=st.lists(pair, min_size=1, max_size=5), as_lists=st.booleans())
@settings(max_examples=400)
def test_several_settings_are_disjoint_windows_or_refused(pairs: list[Any], as_lists: bool) -> None:
    def tokens(first: int | None, stop: int | None) -> set[int]:
        return set(range(first or 0, 100 if stop is None else stop))

    usable = all(
        (first is None or first >= 0) and (stop is None or stop > (first or 0)) and (stop is None or stop >= 1)
        for first, stop in pairs
    )
    usable = usable and sum(len(tokens(*p)) for p in pairs) == len(set().union(*(tokens(*p) for p in pairs)))
    raw = [list(p) for p in pairs] if as_lists else pairs
    if usable:
        windows = parse_windows(None, None, raw)
        assert sorted((first or 0, stop) for first, stop in pairs) == [(w.start, w.end) for w in windows]
    else:
        with pytest.raises(ConfigError) as refused:
            parse_windows(None, None, raw, prefix="p.")
        assert refused.value.key.startswith("p.profile_token_windows")
        assert len(str(refused.value).splitlines()) == 1


@given(windows=anything)
def test_what_is_no_list_of_pairs_is_refused(windows: object) -> None:
    if windows is None or windows == []:
        assert parse_windows(None, None, windows) == (TokenWindow(0, None),)
        return
    with pytest.raises(ConfigError) as refused:
        parse_windows(None, None, windows)
    assert "as in [[20,80],[4096,4112]]" in str(refused.value)


typed_on_a_command_line = st.one_of(
    st.integers().map(str),
    st.floats().map(str),
    st.sampled_from(
        ["null", "true", "False", "12", "'12'", '" 5 "', "1_000", "0x10", "1e3", "''", "[1]", "30:60", "inf", "${a}"]
    ),
    st.text(st.characters(codec="utf-8", exclude_characters="$\n"), max_size=12),
)


def integer_in(value: object) -> int | None:
    """What a typed node takes: null, an integer, or one in text.

    Raises:
        ValueError: anything else.
    """
    if value is None or type(value) is int:
        return value
    if isinstance(value, str):
        return 7 if value == "${a}" else int(value)
    raise ValueError


@given(start=typed_on_a_command_line, end=typed_on_a_command_line)
@settings(max_examples=120, deadline=None)
@pytest.mark.filterwarnings("ignore:Implicit conversion")  # OmegaConf 2.4, on an integer in text
def test_overrides_are_a_window_or_refused_by_the_composed_schema(start: str, end: str) -> None:
    """The same through Hydra's own grammar and the typed node, which takes integers, integers in text, and null."""
    cfg = OmegaConf.create({"a": 7, "profiler": OmegaConf.structured(TorchWindow)})
    numbers: list[int | None] = []
    for name, text in (("start", start), ("end", end)):
        try:
            override = OverridesParser.create().parse_override(f"profiler.profile_token_{name}={text}")
        except HydraException:
            return  # refused before us
        if override.is_sweep_override():
            return  # several jobs, each with a value of its own
        value = override.value()
        try:
            number = integer_in(value)
        except ValueError:
            with pytest.raises(ValidationError):
                OmegaConf.update(cfg, f"profiler.profile_token_{name}", value)
            return
        OmegaConf.update(cfg, f"profiler.profile_token_{name}", value)
        numbers.append(number)
    expected: tuple[TokenWindow, ...] | None = None
    with contextlib.suppress(ConfigError):
        expected = parse_windows(*numbers, [])
    if expected is None:
        with pytest.raises(ConfigError, match=r"^profiler\.profile_token_(start|end)="):
            validate(cfg)
    else:
        found = validate(cfg)
        assert found is not None
        assert found.windows == expected


# -- the window itself -------------------------------------------------------------------------------------------------


@given(
    start=st.integers(0, 30), end=st.one_of(st.none(), st.integers(1, 40)), lo=st.integers(0, 50), n=st.integers(0, 9)
)
def test_overlap_and_containment_agree_with_the_set_of_tokens(start: int, end: int | None, lo: int, n: int) -> None:
    if end is not None and end <= start:
        return
    window = TokenWindow(start, end)
    tokens = set(range(start, 1000 if end is None else end))
    assert window.overlaps(lo, lo + n) == bool(tokens & set(range(lo, lo + n)))
    assert (lo in window) == (lo in tokens)


def test_words_for_a_window() -> None:
    closed, open_end = TokenWindow(20, 80), TokenWindow(40, None)
    assert (str(closed), closed.label, closed.length, closed.is_open) == ("[20, 80)", "20-80", 60, False)
    assert (str(open_end), open_end.label, open_end.length, open_end.is_open) == ("[40, end)", "40-end", None, True)


def test_start_and_end_do_not_go_with_windows() -> None:
    for name in ("profile_token_start", "profile_token_end"):
        with pytest.raises(ConfigError, match=f"^p.{name}=5: cannot be set together with p.profile_token_windows"):
            parse({name: 5, "profile_token_windows": [[0, 4]]}, prefix="p.")


def test_nothing_may_follow_an_open_window() -> None:
    with pytest.raises(ConfigError, match=r"\[0\] \[10, end\) and \[1\] \[20, 30\)"):
        parse({"profile_token_windows": [[10, None], [20, 30]]})


def test_a_long_value_is_cut_in_the_message() -> None:
    with pytest.raises(ConfigError) as refused:
        parse({"profile_token_start": "x\n" * 5000})
    assert len(str(refused.value)) < 300
    assert "(15002 characters)" in str(refused.value)


def test_the_error_survives_a_worker_process() -> None:
    error = pickle.loads(pickle.dumps(ConfigError("a.b", 3, "must be 4")))  # noqa: S301 - our own bytes
    assert (error.key, error.value, error.allowed, str(error)) == ("a.b", 3, "must be 4", "a.b=3: must be 4")
