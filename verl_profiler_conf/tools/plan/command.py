"""The command `verl-profiler plan`: of a launch, after `--`, or of a window in the engines' counters."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

TIMEOUT = 300.0
"""Seconds in which a launch has to come to its job; imports of a framework take most of them."""


def add_plan(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Add the sub-command."""
    parser = commands.add_parser(
        "plan",
        help="what a launch would profile, without running it; or a window in the engines' own counters",
        usage="verl-profiler plan [options] [-- COMMAND ...]",
        description="With a COMMAND: runs it up to the point where its Hydra task would start, and tells what would be"
        " profiled. Without: a window in the engines' own counters. Exit status: 0: nothing is wrong; 1: something is;"
        " 2: it could not be planned.",
    )
    parser.add_argument("--start", type=int, help="first response token; without: 0")
    parser.add_argument("--end", type=int, help="response token to stop at; without: to the end of the response")
    parser.add_argument("--device", default="auto", help="auto, cuda, npu or cpu")
    parser.add_argument("--engine", help="vllm, sglang or tensorrt_llm; without: all of them")
    parser.add_argument("--engine-version", help="as in 0.32.0; without: the installed one")
    parser.add_argument("--prompt-tokens", type=int, help="length of the longest prompt")
    parser.add_argument("--max-num-batched-tokens", type=int, help="tokens that the engine takes into one forward")
    parser.add_argument("--num-speculative-tokens", type=int, help="draft tokens per forward")
    launch = parser.add_argument_group("with a COMMAND")
    launch.add_argument(
        "--like", type=Path, help="folder of an earlier run, whose manifests say what an iteration costs"
    )
    launch.add_argument("--layers", type=int, help="layers of the model, for an estimate without --like")
    launch.add_argument("--max-size", help="most that the traces may take, as in 2GiB")
    launch.add_argument("--timeout", type=float, default=TIMEOUT, help=f"seconds to wait (default {TIMEOUT:g})")
    launch.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=_plan, launch=[])


def plan_launch(arguments: argparse.Namespace) -> dict[str, Any]:
    """The report of the launch in the arguments, with estimates.

    Raises:
        CannotRunError: there is no such command.
        ConfigError: `--max-size` is no size, or `--layers` no number of layers.
    """
    from verl_profiler_conf.core.errors import ConfigError
    from verl_profiler_conf.core.sizes import parse_size
    from verl_profiler_conf.tools.plan.estimate import add_estimate
    from verl_profiler_conf.tools.plan.launch import run_launch

    limit = None if arguments.max_size is None else parse_size(arguments.max_size, "--max-size")
    if arguments.layers is not None and arguments.layers < 1:
        raise ConfigError("--layers", arguments.layers, "must be at least 1")
    report = run_launch(arguments.launch, seconds=arguments.timeout)
    for job in report["jobs"]:
        add_estimate(job, like=arguments.like, max_size=limit, layers=arguments.layers)
    return report


def is_wrong(report: dict[str, Any]) -> bool:
    """Whether anything of a launch is wrong. In a sweep, a job without an option may be meant."""
    jobs = report["jobs"]
    if report["problems"]:
        return True
    if report.get("sweep") and any(job["option"] for job in jobs if "option" in job):
        return any(job["problems"] for job in jobs if job.get("option", "?"))
    return any(job["problems"] for job in jobs)


def _plan(arguments: argparse.Namespace) -> int:
    from verl_profiler_conf.core.errors import ConfigError
    from verl_profiler_conf.tools.plan.processes import CannotRunError
    from verl_profiler_conf.tools.plan.show import print_plan
    from verl_profiler_conf.tools.report.terminal import make_console

    if not arguments.launch:
        return _counters(arguments)
    try:
        report = plan_launch(arguments)
    except (CannotRunError, ConfigError) as error:
        return _complain(str(error))
    if arguments.json:
        sys.stdout.write(json.dumps(report, indent=2, default=str) + "\n")
    else:
        print_plan(make_console(), report)
    return 1 if is_wrong(report) else 0


def _counters(arguments: argparse.Namespace) -> int:
    from verl_profiler_conf.core.errors import ConfigError
    from verl_profiler_conf.core.settings import Settings
    from verl_profiler_conf.tools.plan.counters import plan_table
    from verl_profiler_conf.tools.plan.show import print_counters
    from verl_profiler_conf.tools.report.terminal import make_console

    names = ("prompt_tokens", "max_num_batched_tokens", "num_speculative_tokens")
    facts = {"name": arguments.engine, "version": arguments.engine_version}
    facts |= {name: getattr(arguments, name) for name in names}
    try:
        settings = Settings.from_mapping(
            {
                "profile_token_start": arguments.start,
                "profile_token_end": arguments.end,
                "device": arguments.device,
                "engine": {name: fact for name, fact in facts.items() if fact is not None},
            }
        )
        rows = plan_table(settings)
    except ConfigError as error:
        return _complain(str(error))
    print_counters(make_console(), rows)
    return 0


def _complain(line: str) -> int:
    sys.stderr.write(f"verl-profiler plan: {line}\n")
    return 2
