"""What a launch asks its rollout for."""

from __future__ import annotations

from typing import Any

import pytest
from packaging.version import Version
from verl_launches import launch

from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.verl.preset.asked import asked_captures

WINDOWS = (TokenWindow(20, 30), TokenWindow(40, 50))
GPUS = {"trainer.nnodes": 2, "trainer.n_gpus_per_node": 4}


def asked(
    *, version: str = "0.9.1", steps: tuple[int, ...] = (1, 3), gpus: bool = True, size: int = 2, **settings: Any
) -> Any:
    made = Settings(windows=WINDOWS, **{"arm": "request", **settings})
    facts = {"settings": made, "version": Version(version), "steps": steps, "replica_size": size}
    return asked_captures(launch(facts=facts, values=GPUS if gpus else {}))


@pytest.mark.parametrize(
    ("version", "ranks", "replicas"),
    [
        ("0.9.1", (0,), {0: 0}),
        ("0.9.1", (0, 3), {0: 0, 3: 1}),
        ("0.9.1", (7, 64), {7: 3}),  # 8 GPUs there are; the other is warned of before the job
        ("0.9.0", (0, 3), {0: 0, 1: 0, 2: 1, 3: 1}),  # whose servers know which replicas are named, and no more
    ],
)
def test_ranks_with_their_replicas(version: str, ranks: tuple[int, ...], replicas: dict[int, int]) -> None:
    found = asked(version=version, ranks=ranks)
    assert (found.steps, found.replicas, found.windows) == ((1, 3), replicas, WINDOWS)


def test_all_ranks_are_all_gpus() -> None:
    assert asked(all_ranks=True).replicas == {rank: rank // 2 for rank in range(8)}
    assert asked(all_ranks=True, gpus=False) is None


def test_armed_once_there_are_no_steps() -> None:
    assert asked(arm="job").steps == ()


def test_step_0_never_comes_and_is_not_asked_for() -> None:
    assert asked(steps=(0, 2)).steps == (2,)


@pytest.mark.parametrize("settings", [{"version": "0.8.0"}, {"mapping": "iterations"}, {"enable": False}])
def test_what_cannot_be_told_is_not_asked_for(settings: dict[str, Any]) -> None:
    assert asked(**settings) is None


def test_one_by_one() -> None:
    captures = list(asked(ranks=(0, 3)).captures())
    assert len(captures) == len(set(captures)) == 8
    assert [(each.step, each.rank) for each in captures[:2]] == [(1, 0), (1, 3)]
