"""What the names of ranges say, and which ranges are the iterations."""

from __future__ import annotations

import pytest

from verl_profiler_conf.tools.trace.iterations import IterationRange, RangeName, choose, parse_range


class TestNames:
    @pytest.mark.parametrize(
        ("name", "said"),
        [
            ("response_tokens[20:21) iter=33 reqs=8", RangeName("response_tokens", 33, 20, 21, 8, phase="decode")),
            ("response_tokens[0:1) iter=2 reqs=8", RangeName("response_tokens", 2, 0, 1, 8, phase="prefill")),
            ("response_tokens[0:0) iter=1 reqs=1", RangeName("response_tokens", 1, 0, 0, 1, phase="prefill")),
            ("response_tokens[5:5) iter=9 reqs=1", RangeName("response_tokens", 9, 5, 5, 1)),
            ("execute_context_0(0)_generation_8(8)", RangeName("vllm", None, None, None, 8, 0, 8, "decode")),
            ("execute_context_2(900)_generation_0(0)", RangeName("vllm", None, None, None, 2, 2, 0, "prefill")),
            (
                "execute_908_context_1(sq900sk900sqsq810000sqsk810000)_generation_8(sq8sk80sqsq8sqsk80)",
                RangeName("vllm", None, None, None, 9, 1, 8, "mixed"),
            ),
            ("execute_new_1_cached_7", RangeName("vllm", None, None, None, 8, 1, 7, "mixed")),
            ("step[DECODE bs=8]", RangeName("sglang", requests=8, phase="decode")),
            ("step[EXTEND bs=3 toks=1200]", RangeName("sglang", requests=3, phase="prefill")),
            ("step[VERIFY bs=3 x=[1] forward_id=9]", RangeName("sglang", requests=3, phase="decode")),
            ("step[TARGET_X bs=3]", RangeName("sglang", requests=3)),
            ("ProfilerStep#551", RangeName("profiler_step", 551)),
        ],
    )
    def test_iterations(self, name: str, said: RangeName) -> None:
        assert parse_range(name) == said

    @pytest.mark.parametrize(
        "name",
        [
            "aten::mm",
            "",
            "response_tokens",
            "response_tokens[1:2)",
            "response_tokens[1:2) iter=3 reqs=" + "9" * 5000,
            "execute_model",
            "execute_context_0(0)_generation_0(0)",
            "step[DRAFT bs=8]",
            "step[IDLE bs=0]",
            "step[",
            "ProfilerStep#x",
            "ProfilerStep#" + "1" * 5000,
        ],
    )
    def test_other_names(self, name: str) -> None:
        found = parse_range(name)
        assert found is None or (found.number or 0) < 10**18


def ranges(*named: tuple[str, float, float], thread: tuple[object, object] = (1, 1)) -> list[IterationRange]:
    found = []
    for name, begin, end in named:
        parsed = parse_range(name)
        assert parsed is not None
        found.append(IterationRange(parsed, begin, end, thread))
    return found


OWN = ranges(
    ("response_tokens[1:2) iter=1 reqs=2", 100, 190),
    ("response_tokens[0:1) iter=0 reqs=2", 0, 90),
    ("response_tokens[2:3) iter=2 reqs=2", 200, 290),
)
VLLM = ranges(
    ("execute_context_2(9)_generation_0(0)", 5, 50),
    ("execute_context_1(9)_generation_1(1)", 105, 150),
    ("execute_context_0(0)_generation_2(2)", 205, 250),
)
STEPS = ranges(("ProfilerStep#1", 0, 300))


class TestChoice:
    def test_ours_come_first_in_the_order_they_ran(self) -> None:
        assert [r.name.number for r in choose([*STEPS, *OWN])] == [0, 1, 2]

    def test_the_engines_inside_them_tell_prefill_from_decode(self) -> None:
        chosen = choose([*OWN, *STEPS, *VLLM])
        assert [r.name.phase for r in chosen] == ["prefill", "mixed", "decode"]
        assert [r.name.prefills for r in chosen] == [2, 1, 0]
        assert [r.name.lo for r in chosen] == [0, 1, 2]

    def test_a_kind_may_be_asked_for(self) -> None:
        assert [r.name.source for r in choose([*OWN, *STEPS, *VLLM], "profiler_step")] == ["profiler_step"]
        assert choose(OWN, "sglang") == []

    def test_none(self) -> None:
        assert choose([]) == []

    def test_of_the_thread_that_has_most_and_none_inside_another(self) -> None:
        other = ranges(("step[DECODE bs=1]", 0, 10), thread=(1, 2))
        nested = ranges(("step[DECODE bs=2]", 0, 100), ("step[DECODE bs=3]", 10, 20), ("step[EXTEND bs=4]", 100, 110))
        assert [r.name.requests for r in choose([*other, *nested])] == [2, 4]
