"""Input that nobody means to give, for property tests: 2,000 examples in every run, 100,000 in `make test-long`."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from verl_profiler_conf.core.errors import ConfigError

FEW = int(os.environ.get("HOSTILE_EXAMPLES", "2000"))
MANY = 100_000

ANY_TEXT = st.one_of(
    st.text(st.characters(exclude_categories=())),  # lone surrogates too
    st.binary(max_size=40).map(lambda raw: raw.decode(errors="surrogateescape")),
    st.sampled_from(
        [
            "",
            "null",
            "~",
            "auto",
            "cpu",
            "${oc.env:NO_SUCH_NAME}",
            "${oc.env:HOME}",
            "${profiler}",
            "${",
            "${.track}",
            "${..}",
            "???",
            "!!python/object/apply:os.system [true]",
            "__import__('os').abort()",
            "../../etc/passwd",
            "/dev/null/x",
            "s3://bucket/x",
            "file://x",
            "a\nb",
            "a\r\u2028\x85b",
            "\x00",
            "\ud800",
            "0x10",
            "1e3",
            "12",
            "x" * 5_000,
        ]
    ),
)

ANY_SCALAR = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(),
    st.integers(-3, 100),
    st.sampled_from([2**31 - 1, 2**31, 2**63, 10**400, -1]),
    st.just(5_000).map(lambda digits: 10**digits),  # Python refuses to print it
    st.floats(),
    st.binary(max_size=8),
    st.dates(),
    ANY_TEXT,
)

ANY_VALUE = st.recursive(
    ANY_SCALAR,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.one_of(ANY_TEXT, st.integers()), inner, max_size=3)
    ),
    max_leaves=6,
)


def property_tests(check: Callable[[Any], None], strategy: Any, *, inputs: int = 1) -> tuple[Any, Any]:
    """The test of a property, and the long one: `test_x, test_x_long = property_tests(check_x, strategy)`.

    Args:
        check: asserts on one example.
        strategy: of the examples.
        inputs: that an example holds at most.
    """

    def test(count: int, *, derandomize: bool) -> Any:
        def run(value: Any) -> None:
            check(value)

        run.__name__ = run.__qualname__ = check.__name__
        run.__doc__ = check.__doc__
        made = given(strategy)(run)
        return settings(
            max_examples=count,
            deadline=None,
            derandomize=derandomize,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(made)

    few, many = test(FEW // inputs, derandomize=True), test(MANY // inputs, derandomize=False)
    return few, pytest.mark.long(pytest.mark.timeout(0)(many))


def outcome(call: Callable[[], Any]) -> tuple[Any, str | None]:
    """What a call returns; or the text by which it refuses, which has to be one line."""
    try:
        return call(), None
    except ConfigError as error:
        refusal = str(error)
    assert is_one_line(refusal), repr(refusal)
    return None, refusal


def is_one_line(text: str) -> bool:
    """Whether a terminal and a log show it in one line, and UTF-8 can hold it."""
    return len(text.splitlines()) == 1 and text.isprintable()
