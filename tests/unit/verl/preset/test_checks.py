"""What is refused and what is warned of, from plain values: no config is composed here."""

from __future__ import annotations

import pickle
import re
import subprocess
import sys
from dataclasses import replace
from typing import Any

import pytest
from packaging.version import Version
from verl_launches import launch

from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.verl.preset.checks import launch_warnings, refusals
from verl_profiler_conf.verl.preset.facts import ENV_KEY
from verl_profiler_conf.verl.preset.keys import key_table


def test_what_agrees_is_neither_refused_nor_warned_of() -> None:
    assert [*refusals(launch()), *launch_warnings(launch())] == []


def test_the_checks_import_no_omegaconf_and_no_hydra() -> None:
    code = "import sys, verl_profiler_conf.verl.preset.checks; print({'omegaconf', 'hydra', 'verl'} & set(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_a_ray_that_loses_the_window_is_told_before_the_job() -> None:
    (line,) = launch_warnings(launch(ray_reads_window=False))
    assert "RAY_JOB_CONFIG_JSON_ENV_VAR" in line
    assert ENV_NAME in line


def verl_defaults() -> dict[str, Any]:
    """What files that leave the preset's keys alone say of them."""
    keys = key_table("torch", Version("0.9.1")).values()
    return {**{key.inherits: None for key in keys if key.inherits}, **{key.path: key.default for key in keys}}


RESPONSE = "actor_rollout_ref.rollout.response_length"
CONTEXT = "actor_rollout_ref.rollout.max_model_len"


def window(start: int, end: int | None, values: dict[str, Any]) -> tuple[list[str], list[str]]:
    """What is refused and what is warned of."""
    settings = Settings(windows=(TokenWindow(start, end),), arm="request")
    made = launch(facts={"settings": settings}, values=values)
    return [str(error) for error in refusals(made)], list(launch_warnings(made))


class TestAWindowBeyondTheResponses:
    def test_both_numbers_are_told(self) -> None:
        (error,), _ = window(4096, 4100, {RESPONSE: 4096})
        assert error == (
            f"profiler.profile_token_start=4096: no response gets there: with {RESPONSE}=4096 the last response token"
            " is 4095"
        )

    def test_the_context_holds_a_prompt_too(self) -> None:
        assert window(98, None, {CONTEXT: 100}) == ([], [])
        (error,), _ = window(99, None, {CONTEXT: 100})
        assert f"{CONTEXT}=100 the last response token is 98" in error

    @pytest.mark.parametrize(
        "turns",
        [
            {"actor_rollout_ref.rollout.multi_turn.enable": True},
            {"actor_rollout_ref.rollout.agent.default_agent_loop": "tool_agent"},
        ],
    )
    def test_of_several_requests_more_may_be_made_than_is_kept(self, turns: dict[str, Any]) -> None:
        errors, (warning,) = window(50, 60, {RESPONSE: 40, **turns})
        assert errors == []
        assert warning.endswith("response token is 39, so that the window is not captured to its end, if at all")

    def test_a_window_that_ends_beyond_is_warned_of_once(self) -> None:
        errors, warnings = window(30, 60, {RESPONSE: 40, CONTEXT: 50})
        assert errors == []
        (line,) = warnings
        assert line.startswith("tokens [30, 60): with actor_rollout_ref.rollout.response_length=40 the last")
        assert window(30, 40, {RESPONSE: 40, CONTEXT: 50}) == ([], [])
        assert window(30, None, {RESPONSE: 40, CONTEXT: 50}) == ([], []), "to the end of the response"

    def test_one_of_several_windows(self) -> None:
        settings = Settings(windows=(TokenWindow(2, 4), TokenWindow(50, 60)), arm="request")
        (error,) = refusals(launch(facts={"settings": settings}, values={RESPONSE: 40}))
        assert str(error).startswith("profiler.profile_token_windows=50: no response gets there")


class TestConflicts:
    def test_all_in_one_message_each_with_what_to_write_instead(self) -> None:
        values = {"global_profiler.steps": [1, 3], "global_profiler.tool": "nsys", "critic.profiler.enable": True}
        (error,) = refusals(launch(values=values))
        first, *lines = str(error).splitlines()
        assert first == "3 keys contradict the preset:"
        parts = [re.split(": (?=contradicts|write|remove)", line.strip()) for line in lines]
        assert parts == [
            [
                "global_profiler.tool='nsys'",
                "contradicts profiler, which needs 'torch' (the option's name says which)",
                "remove it",
            ],
            [
                "global_profiler.steps=[1, 3]",
                "contradicts profiler.steps, which makes it [2]",
                "write profiler.steps=[1,3] instead",
            ],
            [
                "critic.profiler.enable=True",
                "contradicts profiler.roles, which makes it False",
                "write profiler.roles=[rollout,critic] instead",
            ],
        ]
        assert str(pickle.loads(pickle.dumps(error))) == str(error)  # noqa: S301 - our own

    def test_a_key_that_file_and_command_line_set_is_told_once(self) -> None:
        values = {"global_profiler.steps": [5]}
        plain = launch(values=values)
        (error,) = refusals(replace(plain, own_values={**verl_defaults(), **values}))
        assert "\n" not in str(error)

    @pytest.mark.parametrize(
        ("key", "found", "instead"),
        [
            ("global_profiler.tool", "npu", "write +profiler=verl_npu_window instead"),
            ("global_profiler.steps", None, "remove it"),
            ("global_profiler.save_path", "/mine", "write profiler.save_path=/mine instead"),
            ("actor_rollout_ref.rollout.profiler.enable", False, "write profiler.enable=false instead"),
            ("actor_rollout_ref.rollout.profiler.ranks", [3, 5], "write profiler.ranks=[3,5] instead"),
            ("actor_rollout_ref.rollout.profiler.ranks", [], "write profiler.ranks=[0] instead"),
            ("actor_rollout_ref.rollout.profiler.all_ranks", True, "write profiler.all_ranks=true instead"),
            ("actor_rollout_ref.rollout.profiler.tool_config.torch.discrete", False, "remove it"),
            (
                "actor_rollout_ref.rollout.profiler.tool_config.torch.contents",
                ["cpu", "stack"],
                "write profiler.contents=[cpu,stack] instead",
            ),
            # of the window [20, 30)
            ("actor_rollout_ref.rollout.profiler.tool_config.torch.profile_token_start", 20, "remove it"),
            (
                "actor_rollout_ref.rollout.profiler.tool_config.torch.profile_token_start",
                25,
                "write profiler.profile_token_start=25 instead",
            ),
            ("actor_rollout_ref.actor.profiler.ranks", [1], "write profiler.ranks=[1] instead"),
            (ENV_KEY, "x", "is set by the preset from profiler: remove it"),
        ],
    )
    def test_what_to_write_instead(self, key: str, found: Any, instead: str) -> None:
        (error,) = refusals(launch(values={key: found}))
        assert str(error).endswith(instead)

    def test_a_role_less(self) -> None:
        (error,) = refusals(
            launch(facts={"roles": ("rollout", "actor")}, values={"actor_rollout_ref.actor.profiler.enable": False})
        )
        assert str(error).endswith("write profiler.roles=[rollout] instead")

    def test_before_091_verls_ranks_are_replicas(self) -> None:
        facts = {"version": Version("0.9.0"), "replica_size": 2}
        (error,) = refusals(launch(facts=facts, values={"actor_rollout_ref.rollout.profiler.ranks": [1, 2]}))
        assert str(error).endswith("write profiler.ranks=[2,3,4,5] instead")


@pytest.mark.parametrize(
    "key", ["global_profiler.finish_hook_cmd", "actor_rollout_ref.rollout.profiler.finish_hook_cmd"]
)
def test_a_command_that_verl_would_not_run_is_told_of(key: str) -> None:
    (line,) = launch_warnings(launch(values={key: "upload $VERL_PROFILE_SAVE_PATH"}))
    assert line.startswith(f"{key}: verl runs it in training workers that are profiled")
    more = launch(facts={"roles": ("rollout", "actor")}, values={key: "upload"})
    assert list(launch_warnings(more)) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"trainer.nnodes": 1, "trainer.n_gpus_per_node": 4}, "ranks: [9] do not exist: the rollout has 4 GPUs"),
        # trainers that give the rollout resources of its own
        (
            {
                "trainer.nnodes": 4,
                "trainer.n_gpus_per_node": 4,
                "rollout.nnodes": 1,
                "rollout.n_gpus_per_node": 8,
                "async_training": {},
            },
            "ranks: [9] do not exist: the rollout has 8 GPUs",
        ),
    ],
)
def test_the_rollouts_own_gpus_are_counted(values: dict[str, Any], said: str) -> None:
    settings = Settings(windows=(TokenWindow(20, 30),), arm="request", ranks=(9,))
    (line,) = launch_warnings(launch(facts={"settings": settings}, values=values))
    assert said in line


@pytest.mark.parametrize(
    ("version", "arm", "ranks", "said"),
    [
        ("0.8.0", "job", (0, 1), "ranks [0, 1] of each of the 4 replicas capture"),
        ("0.8.0", "request", (0, 3), "ranks [0, 1] of each of the replicas [0, 1] capture"),
        ("0.9.0", "request", (0, 3), "ranks [0, 1] of each of the replicas [0, 1] capture"),
        ("0.9.0", "job", (0, 1), None),
        ("0.9.1", "request", (0, 3), None),
        ("0.9.1", "job", (0, 3), None),
    ],
)
def test_before_servers_narrow_the_ranks_more_of_them_capture(
    version: str, arm: str, ranks: tuple[int, ...], said: str | None
) -> None:
    settings = Settings(windows=(TokenWindow(20, 30),), arm=arm, ranks=ranks)
    gpus = {"trainer.nnodes": 1, "trainer.n_gpus_per_node": 8}
    facts = {"settings": settings, "version": Version(version), "replica_size": 2}
    lines = list(launch_warnings(launch(facts=facts, values=gpus)))
    assert [said in line for line in lines if said] == ([True] if said else [])
    assert len(lines) == bool(said)


def test_nothing_is_refused_of_keys_that_the_files_leave_alone() -> None:
    plain = launch()
    own = verl_defaults()
    assert list(refusals(replace(plain, own_values=own))) == []
    (error,) = refusals(replace(plain, own_values={**own, "global_profiler.steps": [5]}))
    assert str(error).startswith("global_profiler.steps=[5]: contradicts profiler.steps")
