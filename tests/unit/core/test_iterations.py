"""The window in the engines' counters: the arithmetic against facts that were executed, and against its own inverse."""

from __future__ import annotations

import ast
import sys
from itertools import product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from verl_profiler_conf.core import iterations
from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.iterations import captured, captured_iterations, plain_counters, plan, start_stop_text
from verl_profiler_conf.core.iterations.result import CANNOT, EXACT, Fit
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow

FOREVER = MAX_TOKEN + 1

VERSIONS = {
    "vllm": [
        "0.9.0",
        "0.10.2",
        "0.11.0",
        "0.11.2",
        "0.12.0",
        "0.13.0",
        "0.20.1",
        "0.20.2rc1",
        "0.28.0",
        "0.33.0",
        "1.0",
    ],
    "sglang": [
        "0.4.5",
        "0.4.6",
        "0.4.9",
        "0.4.9.post2",
        "0.5.3",
        "0.5.4",
        "0.5.14",
        "0.5.15",
        "0.5.16",
        "0.5.23",
        "0.6",
    ],
    "tensorrt_llm": ["0.17.0", "1.2.0", "1.3.0rc14", "1.3.0rc15", "1.4.0", "2.0"],
}


def tokens(window: TokenWindow) -> range:
    return range(window.start, FOREVER if window.end is None else window.end)


@st.composite
def windows(draw: st.DrawFn, most: int = 5000) -> TokenWindow:
    start = draw(st.integers(0, most))
    return TokenWindow(start, draw(st.none() | st.integers(start + 1, most + 100)))


@st.composite
def engines(draw: st.DrawFn) -> tuple[str, str | None, str | None]:
    engine = draw(st.sampled_from(sorted(VERSIONS)))
    workers = ["gpu"] if engine == "tensorrt_llm" else ["gpu", "cpu", "xpu", "npu", "tpu"]
    return engine, draw(st.none() | st.sampled_from(VERSIONS[engine])), draw(st.none() | st.sampled_from(workers))


class TestPlanAndCaptured:
    @given(
        window=windows(),
        engine=engines(),
        prompt=st.none() | st.integers(1, 100_000),
        budget=st.none() | st.integers(1, 8192),
        drafted=st.none() | st.integers(0, 4),
        before=st.none() | st.integers(0, 10_000),
    )
    def test_an_exact_plan_captures_the_window(
        self,
        window: TokenWindow,
        engine: tuple[str, str | None, str | None],
        prompt: int | None,
        budget: int | None,
        drafted: int | None,
        before: int | None,
    ) -> None:
        name, version, worker = engine
        answer = plan(
            window,
            engine=name,
            version=version,
            worker=worker,
            prompt_tokens=prompt,
            max_num_batched_tokens=budget,
            num_speculative_tokens=drafted,
            forward_count=before,
        )
        recorded = captured(
            name, version, answer.values, answer.prefill_iteration, worker=worker, forward_count=before or 0
        )
        if answer.fit.kind != "cannot":
            assert recorded == tokens(window)
        elif not drafted:
            assert set(answer.values.values()) == {None}
        edges = (answer.fit.earliest, answer.fit.latest)
        assert (edges == (0, 0)) == (answer.fit.kind in ("exact", "cannot")), "a shift says by how much"

    @pytest.mark.parametrize("engine", ["vllm", "sglang"])
    @pytest.mark.parametrize("worker", ["gpu", "cpu", "npu", "tpu"])
    @pytest.mark.parametrize(
        "window", [TokenWindow(0, 3), TokenWindow(2, 4), TokenWindow(2, None), TokenWindow(0, None)]
    )
    def test_where_it_cannot_be_no_values_would_do(self, engine: str, worker: str, window: TokenWindow) -> None:
        for version in VERSIONS[engine]:
            answer = plan(window, engine=engine, version=version, worker=worker, num_speculative_tokens=0)
            first, second = answer.values
            found = any(
                captured(engine, version, {first: a, second: b}, worker=worker) == tokens(window)
                for a, b in product(range(8), range(8))
            )
            assert found == (answer.fit.kind != "cannot"), version

    @pytest.mark.parametrize(("prompt", "budget", "iteration"), [(1, 64, 0), (64, 64, 0), (65, 64, 1), (600, 64, 9)])
    def test_a_prompt_takes_as_many_iterations_as_the_budget_makes_chunks(
        self, prompt: int, budget: int, iteration: int
    ) -> None:
        answer = plan(TokenWindow(20, 30), engine="vllm", prompt_tokens=prompt, max_num_batched_tokens=budget)
        assert answer.prefill_iteration == iteration
        assert answer.values == {"delay_iterations": iteration + 21, "max_iterations": 10}


class TestVllm:
    @pytest.mark.parametrize(
        ("delay", "most", "recorded"),
        [(0, 3, [0, 1, 2]), (1, 3, [0, 1, 2]), (2, 3, [1, 2, 3]), (5, 1, [4]), (20, 10, list(range(19, 29)))],
    )
    @pytest.mark.parametrize("version", ["0.12.0", "0.16.0", "0.28.0", "0.33.0", None])
    def test_records_what_was_measured(self, version: str | None, delay: int, most: int, recorded: list[int]) -> None:
        counters = {"delay_iterations": delay, "max_iterations": most}
        assert list(captured_iterations("vllm", version, counters)) == recorded

    def test_counts_one_more_than_the_iteration_except_for_the_first(self) -> None:
        values = {
            window: tuple(plan(window, engine="vllm", version="0.32.0").values.values())
            for window in (TokenWindow(0, 5), TokenWindow(1, 5), TokenWindow(20, 80), TokenWindow(3, None))
        }
        assert list(values.values()) == [(0, 5), (2, 4), (21, 60), (4, 0)]

    @pytest.mark.parametrize(
        ("worker", "version", "kind"),
        [
            (None, "0.11.2", "cannot"),
            (None, "0.12.0", "exact"),
            ("cpu", "0.11.0", "cannot"),
            ("cpu", "0.12.0", "cannot"),
            ("cpu", "0.13.0", "exact"),
            ("xpu", "0.12.0", "cannot"),
            ("tpu", "0.13.0", "cannot"),
            ("npu", "0.18.0", "cannot"),
            ("npu", "0.19.1rc1", "cannot"),
            ("npu", "0.20.2rc1", "exact"),
            ("npu", "0.23.0", "exact"),
        ],
    )
    def test_what_a_worker_honours_depends_on_its_version(self, worker: str | None, version: str, kind: str) -> None:
        assert plan(TokenWindow(20, 80), engine="vllm", version=version, worker=worker).fit.kind == kind

    def test_a_worker_without_bounds_still_records_a_whole_response(self) -> None:
        answer = plan(TokenWindow(0, None), engine="vllm", version="0.19.1rc1", worker="npu")
        assert answer.fit == EXACT
        assert captured("vllm", "0.19.1rc1", answer.values, worker="npu") == range(FOREVER)

    @pytest.mark.parametrize("version", ["0.11.0", "0.12.0"])
    def test_a_cpu_worker_without_a_working_profiler_records_nothing(self, version: str) -> None:
        assert len(captured("vllm", version, {}, worker="cpu")) == 0
        assert plan(TokenWindow(0, None), engine="vllm", version=version, worker="cpu").fit == CANNOT


class TestSglang:
    @pytest.mark.parametrize(
        ("version", "before", "start", "steps", "recorded"),
        [
            ("0.5.12", 0, None, 3, [0, 1]),
            ("0.5.12", 0, None, 1, []),
            ("0.5.12", 0, 4, 3, [3, 4, 5]),
            ("0.5.12", 100, 4, 3, [0, 1, 2]),
            ("0.5.12", 100, 104, 3, [3, 4, 5]),
            ("0.5.23", 0, None, 3, [0, 1, 2]),
            ("0.5.23", 0, 0, 3, [0, 1, 2]),
            ("0.5.15", 0, None, 3, [0, 1]),
            ("0.5.15.post1", 0, None, 3, [0, 1]),
            ("0.5.16", 0, None, 3, [0, 1, 2]),
            ("0.4.9.post2", 0, 4, 3, [3, 4, 5]),
            ("0.4.9.post1", 0, 4, 3, [0, 1]),
        ],
    )
    def test_records_what_was_executed(
        self, version: str, before: int, start: int | None, steps: int, recorded: list[int]
    ) -> None:
        counters = {"start_step": start, "num_steps": steps}
        assert list(captured_iterations("sglang", version, counters, forward_count=before)) == recorded

    @pytest.mark.parametrize("before", [None, 0, 500])
    def test_from_token_0_on_it_matters_not_what_ran_before(self, before: int | None) -> None:
        answer = plan(TokenWindow(0, 7), engine="sglang", version="0.5.12", forward_count=before)
        assert answer.values == {"start_step": 1, "num_steps": 7}
        assert "forward" not in " ".join(answer.assumes)

    def test_a_later_start_is_relative_to_the_forwards_before_the_call(self) -> None:
        known = plan(TokenWindow(20, 80), engine="sglang", version="0.5.23", forward_count=100)
        assert known.values == {"start_step": 121, "num_steps": 60}
        assert not any("forward" in fact for fact in known.assumes)
        unknown = plan(TokenWindow(20, 80), engine="sglang", version="0.5.23")
        assert unknown.values == {"start_step": 21, "num_steps": 60}
        assert any("forward_count unknown" in fact for fact in unknown.assumes)

    def test_chunks_of_the_prompt_come_along_only_if_what_ran_before_is_unknown(self) -> None:
        def of(before: int | None) -> dict[str, int | None]:
            return dict(
                plan(
                    TokenWindow(0, 5),
                    engine="sglang",
                    version="0.5.12",
                    prompt_tokens=30,
                    max_num_batched_tokens=10,
                    forward_count=before,
                ).values
            )

        assert of(None) == {"start_step": 1, "num_steps": 7}
        assert of(0) == {"start_step": 3, "num_steps": 5}

    def test_without_start_step_the_lost_iteration_is_asked_for_as_well(self) -> None:
        assert plan(TokenWindow(0, 5), engine="sglang", version="0.4.9").values == {"start_step": None, "num_steps": 6}
        assert plan(TokenWindow(1, 5), engine="sglang", version="0.4.9").fit == CANNOT
        assert plan(TokenWindow(0, None), engine="sglang", version="0.4.9").fit == EXACT

    def test_forwards_in_a_thread_of_their_own_blur_the_edges(self) -> None:
        assert plan(TokenWindow(3, 5), engine="sglang", version="0.5.3").fit == Fit("shifted", -1, 1)
        assert plan(TokenWindow(0, None), engine="sglang", version="0.5.3").fit == EXACT
        assert plan(TokenWindow(3, 5), engine="sglang", version="0.5.4").fit == EXACT


class TestTensorrt:
    @pytest.mark.parametrize(("version", "text"), [("1.2.0", "20-79"), ("1.3.0rc14", "20-79"), ("1.3.0rc15", "20-80")])
    def test_the_last_iteration_is_named_or_excluded(self, version: str, text: str) -> None:
        answer = plan(TokenWindow(20, 80), engine="tensorrt_llm", version=version, forward_count=0)
        assert start_stop_text(answer.values) == text
        assert not any("forward_count" in fact for fact in answer.assumes)

    def test_counts_from_the_start_of_the_executor(self) -> None:
        answer = plan(TokenWindow(3, 4), engine="tensorrt_llm", version="1.2.0", forward_count=10)
        assert answer.values == {"start": 13, "stop": 13}
        assert list(captured_iterations("tensorrt_llm", "1.2.0", answer.values, forward_count=10)) == [3]
        assert len(captured("tensorrt_llm", "1.2.0", answer.values, forward_count=20)) == 0

    def test_unset_records_nothing(self) -> None:
        assert len(captured("tensorrt_llm", None, plain_counters(TokenWindow(0, 5), "tensorrt_llm"))) == 0


class TestSpeculation:
    @pytest.mark.parametrize("window", [TokenWindow(0, 1), TokenWindow(0, None), TokenWindow(1, None)])
    def test_edges_at_the_first_token_stay_certain(self, window: TokenWindow) -> None:
        assert plan(window, engine="vllm", num_speculative_tokens=4).fit == EXACT

    @pytest.mark.parametrize("window", [TokenWindow(0, 2), TokenWindow(2, None), TokenWindow(1, 3)])
    def test_any_other_edge_cannot_be_counted(self, window: TokenWindow) -> None:
        answer = plan(window, engine="vllm", num_speculative_tokens=4)
        assert answer.fit == CANNOT
        assert "1 to 5 tokens" in answer.reason
        assert answer.values == plan(window, engine="vllm").values

    def test_when_unknown_it_is_said_to_be_taken_for_granted(self) -> None:
        assert "no tokens are drafted" in plan(TokenWindow(2, 5), engine="vllm").assumes
        assert plan(TokenWindow(2, 5), engine="vllm", num_speculative_tokens=0).fit == EXACT
        assert "no tokens are drafted" not in plan(TokenWindow(2, 5), engine="vllm", num_speculative_tokens=0).assumes


class TestPlainArithmetic:
    """What verl's own mapping captures."""

    @pytest.mark.parametrize(
        ("engine", "version", "before", "window", "recorded"),
        [
            ("vllm", "0.32.0", 0, TokenWindow(0, 10), range(10)),
            ("vllm", "0.32.0", 0, TokenWindow(20, 30), range(19, 29)),
            ("vllm", "0.32.0", 0, TokenWindow(20, None), range(19, FOREVER)),
            ("vllm", "0.11.0", 0, TokenWindow(20, 30), range(FOREVER)),
            ("sglang", "0.5.12", 0, TokenWindow(0, 10), range(9)),
            ("sglang", "0.5.12", 0, TokenWindow(0, 1), range(0)),
            ("sglang", "0.5.12", 0, TokenWindow(20, 30), range(19, 29)),
            ("sglang", "0.5.12", 19, TokenWindow(20, 30), range(10)),
            ("sglang", "0.5.12", 500, TokenWindow(20, 30), range(10)),
            ("sglang", "0.5.16", 500, TokenWindow(0, 10), range(10)),
        ],
    )
    def test_captures(self, engine: str, version: str, before: int, window: TokenWindow, recorded: range) -> None:
        counters = plain_counters(window, engine)
        assert captured(engine, version, counters, forward_count=before) == recorded

    def test_a_chunked_prompt_moves_it_further(self) -> None:
        counters = plain_counters(TokenWindow(20, 30), "vllm")
        assert captured("vllm", "0.32.0", counters, prefill_iteration=9) == range(10, 20)
        assert len(captured("vllm", "0.32.0", counters, prefill_iteration=100)) == 0


class TestVersions:
    @pytest.mark.parametrize("version", [None, "dev", "0.0.0-my build"])
    def test_unknown_counts_as_the_newest_and_says_so(self, version: str | None) -> None:
        answer = plan(TokenWindow(2, 5), engine="sglang", version=version)
        assert answer.version == "0.5.23"
        assert any("counts as 0.5.23" in fact for fact in answer.assumes)

    def test_newer_or_older_than_any_that_was_read_says_so(self) -> None:
        assert "vllm 9.1 still counts as 0.33.0 does" in plan(TokenWindow(2, 5), engine="vllm", version="9.1").assumes
        old = plan(TokenWindow(0, 5), engine="sglang", version="0.4.1")
        assert "sglang 0.4.1 counts as 0.4.6 does" in old.assumes

    @pytest.mark.parametrize("version", ["0.32.0+cpu", "0.33.0.post1", "0.13.0"])
    def test_known_ones_take_nothing_for_granted(self, version: str) -> None:
        answer = plan(
            TokenWindow(2, 5),
            engine="vllm",
            version=version,
            prompt_tokens=10,
            max_num_batched_tokens=100,
            num_speculative_tokens=0,
        )
        assert answer.assumes == ()


class TestRefused:
    @pytest.mark.parametrize(
        ("fact", "value"),
        [
            ("prompt_tokens", 0),
            ("max_num_batched_tokens", 0),
            ("num_speculative_tokens", -1),
            ("forward_count", True),
            ("prompt_tokens", "12"),
        ],
    )
    def test_a_number_that_cannot_be(self, fact: str, value: object) -> None:
        with pytest.raises(ConfigError, match=f"engine.{fact}="):
            plan(TokenWindow(2, 5), engine="vllm", **{fact: value})  # type: ignore[arg-type]

    def test_an_unknown_engine(self) -> None:
        with pytest.raises(ConfigError, match="one of vllm, sglang, tensorrt_llm"):
            plan(TokenWindow(2, 5), engine="llama.cpp")
        with pytest.raises(ConfigError, match=r"engine\.name"):
            captured("llama.cpp", None, {})

    def test_an_unknown_worker(self) -> None:
        with pytest.raises(ConfigError, match="one of gpu, cpu"):
            plan(TokenWindow(2, 5), engine="vllm", worker="abacus")
        with pytest.raises(ConfigError, match="for tensorrt_llm"):
            captured("tensorrt_llm", None, {}, worker="npu")


class TestWords:
    @pytest.mark.parametrize(
        ("fit", "text"),
        [
            (EXACT, "exact"),
            (CANNOT, "not possible"),
            (Fit("shifted", -1, -1), "shifted by -1"),
            (Fit("shifted", -1, 1), "shifted by -1 to +1"),
        ],
    )
    def test_of_a_fit(self, fit: Fit, text: str) -> None:
        assert str(fit) == text

    def test_of_a_plan(self) -> None:
        text = str(plan(TokenWindow(20, 80), engine="vllm", version="0.32.0", num_speculative_tokens=0))
        assert text == (
            "vllm 0.32.0: delay_iterations=21, max_iterations=60: exact, if the whole prompt is computed in one"
            " iteration: vLLM starts one iteration before the delay has run out, so iteration 20 takes a delay of 21"
        )
        assert ", if " not in str(plan(TokenWindow(0, None), engine="vllm", version="0.32.0"))


def test_imports_nothing_but_the_core_and_packaging() -> None:
    allowed = ("packaging", "verl_profiler_conf.core", iterations.__name__)
    imported = set()
    for file in sorted(Path(iterations.__file__).parent.glob("*.py")):
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Import):
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom):
                assert node.level == 0, f"{file.name}: a relative import is not looked through"
                imported.add(node.module or "")
    others = {name for name in imported if name.split(".")[0] not in sys.stdlib_module_names}
    assert "packaging.version" in others, "no file was looked through"
    assert {name for name in others if not name.startswith(allowed)} == set()
