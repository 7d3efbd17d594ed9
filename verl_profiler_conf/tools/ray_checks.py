"""Checks of `verl-profiler doctor --ray`: whether every node of a cluster would load the hook of this package."""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from typing import Any

from verl_profiler_conf.core.install import NAME, pip_install
from verl_profiler_conf.counters.plan import installed_version
from verl_profiler_conf.launch.planned import HOOKS, kept_out_by
from verl_profiler_conf.tools.finding import Finding

RAY_SECONDS = 60
"""In which all nodes have to answer."""

ANSWER_SECONDS = 10
"""In which the cluster's address has to take a connection."""


def ray_findings(address: str) -> Iterator[Finding]:
    """What each node of a Ray cluster says of itself: one small task a node, all at once."""
    try:
        import ray
    except ImportError:
        yield Finding("Ray", "error", "not installed here", "run doctor in the environment of the job")
        return
    if not _answers(address):  # Ray itself waits for minutes
        yield Finding("Ray", "error", f"{address}: nothing answers there", "start the cluster, or name its address")
        return
    try:
        ray.init(address=address, log_to_driver=False, logging_level="ERROR")
    except Exception as error:
        lines = str(error).strip().splitlines() or [type(error).__name__]
        yield Finding("Ray", "error", f"{address}: {lines[0]}", "start the cluster, or name its address")
        return
    try:
        nodes = sorted(ray.nodes(), key=lambda node: str(node["NodeManagerAddress"]))
        alive = [node for node in nodes if node["Alive"]]
        asked = [(node["NodeManagerAddress"], _ask(ray, node["NodeID"])) for node in alive]
        end = time.monotonic() + RAY_SECONDS
        for place, reference in asked:
            yield from _of_node(f"Ray node {place}", ray, reference, max(end - time.monotonic(), 0.1))
        there = {place for place, _ in asked}
        for place in sorted({node["NodeManagerAddress"] for node in nodes} - there):
            yield Finding(
                f"Ray node {place}",
                "warning",
                "is dead: nothing runs there, and captures that lie on its disk are not brought",
                "start Ray there again (ray start --address=...), unless it has left for good",
            )
    finally:
        ray.shutdown()


def _answers(address: str) -> bool:
    """Whether something listens at `host:port`. Of other addresses (`auto`) Ray knows at once."""
    host, colon, port = address.rpartition("://")[2].partition("?")[0].rpartition(":")
    if not colon or not port.isdigit():
        return True
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=ANSWER_SECONDS).close()
    except (OSError, OverflowError):
        return False
    return True


def _ask(ray: Any, node: str) -> Any:
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

    def answer(name: str, variables: list[str]) -> tuple[str | None, dict[str, str]]:
        # by value, not a function of this module: the node may lack the package
        import os
        from importlib.metadata import PackageNotFoundError, version

        values = {each: os.environ[each] for each in variables if each in os.environ}
        try:
            return version(name), values
        except PackageNotFoundError:
            return None, values

    place = NodeAffinitySchedulingStrategy(node, soft=False)
    task = ray.remote(num_cpus=0, max_retries=0)(answer).options(scheduling_strategy=place)
    return task.remote(NAME, [variable for _, variable in HOOKS.values()])


def _of_node(about: str, ray: Any, reference: Any, seconds: float) -> Iterator[Finding]:
    own = installed_version(NAME)
    try:
        found, variables = ray.get(reference, timeout=seconds)
    except Exception as error:
        why = f"no answer within {RAY_SECONDS} s" if isinstance(error, TimeoutError) else _first_line(error)
        yield Finding(about, "error", why, "look at that node: ray status, and its raylet's log")
        return
    if found is None:
        yield Finding(about, "error", f"{NAME} is not installed", f"on that node: {pip_install(version=own)}")
    elif own is not None and found != own:
        here = f"on that node: {pip_install(version=own)}"
        yield Finding(about, "error", f"{NAME} {found}, and {own} here", here)
    else:
        yield Finding(about, "ok", f"{NAME} {found}")
    for engine, (_, variable) in HOOKS.items():
        blocked = kept_out_by(engine, variables.get(variable))
        if blocked is not None:
            text, _, fix = blocked.partition(": ")
            yield Finding(about, "error", text, f"{fix}, before ray start")


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines() or [""]
    return f"no answer: {type(error).__name__}: {lines[0]}".rstrip(": ")
