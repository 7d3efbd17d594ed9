"""Checks a launch of verl before it starts: refuses what contradicts a preset, and warns of what may surprise.

Pure functions of a `VerlLaunch`: they read no config and do not import verl. They log only the warnings.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.settings import ENV_NAME, Settings
from verl_profiler_conf.core.window import START_KEY, WINDOWS_KEY
from verl_profiler_conf.verl.preset.conflicts import one_message
from verl_profiler_conf.verl.preset.facts import (
    AGENT_KEY,
    ASYNC_TRAINING_KEY,
    CONTEXT_KEY,
    ENGINE_KEY,
    ENGINES,
    ENV_KEY,
    FINISH_KEYS,
    GLOBAL_RANKS_SINCE,
    OLDEST,
    RESPONSE_KEY,
    ROLLOUT_NODES_KEY,
    TOKENS_SINCE,
    TOTAL_STEPS_KEY,
    TURNS_KEY,
    USE_V1_KEY,
    VerlLaunch,
    engine_ranks,
    parse_version,
)
from verl_profiler_conf.verl.preset.keys import Key, contradiction, key_table
from verl_profiler_conf.verl.ray_env import JOB_CONFIG

SINGLE_TURN = "single_turn_agent"
"""verl's agent loop for responses of one request."""

log = logging.getLogger(__name__)


def check_launch(launch: VerlLaunch) -> Settings:
    """Refuse what contradicts a preset; warn of what may surprise.

    Returns:
        The settings for engine processes.

    Raises:
        ConfigError: one line that names verl's key and the preset's.
    """
    settings = launch.facts.settings
    error = next(refusals(launch), None)
    if error is not None:
        raise error
    if not settings.enable:
        return settings
    for line in launch_warnings(launch):
        log.warning("%s", line)
    return replace(settings, ranks=engine_ranks(settings.ranks, launch.facts.replica_size))


def refusals(launch: VerlLaunch) -> Iterator[ConfigError]:
    """What stops the launch, the most important first. All keys of verl that contradict the preset are one refusal."""
    yield from _unresolvable(launch)
    if launch.facts.settings.enable:
        yield from _unfit_app(launch)
        yield from _window_out_of_reach(launch)
    conflicts = {error.key: error for error in _conflicts(launch)}
    if conflicts:
        yield one_message(list(conflicts.values()))


def _conflicts(launch: VerlLaunch) -> Iterator[ConfigError]:
    """Keys of verl that contradict the preset. A key may come twice."""
    facts = launch.facts
    table = list(key_table(facts.tool, facts.version).values())
    for key in table:
        yield from _overwritten(key, launch)
    if not facts.settings.enable:
        return
    for key in table:
        if not key.sets and key.inherits and launch.values[key.path] == launch.values[key.inherits]:
            continue  # the message names the key that it is derived from
        error = contradiction(key, facts, launch.values[key.path], launch.prefix)
        if error is not None:
            yield error
    if launch.values[ENV_KEY] is not None:
        yield ConfigError(ENV_KEY, launch.values[ENV_KEY], f"is set by the preset from {launch.path}: remove it")


def launch_warnings(launch: VerlLaunch) -> Iterator[str]:
    """What is no error, but likely to surprise. One line each."""
    yield from _length_warnings(launch)
    yield from _step_warnings(launch)
    yield from _rank_warnings(launch)
    trainer = _trainer_without_profiling(launch)
    if launch.facts.settings.arm == "request" and trainer is not None:
        yield (
            f"{launch.prefix}arm=request: the trainer of {trainer} never starts the rollout's profiler, so nothing"
            f" would be captured; set {launch.prefix}arm=job, which captures the window once, from the start"
        )
    yield from _finish_warnings(launch)
    if not launch.ray_reads_window:
        yield (
            f"the installed Ray does not read {JOB_CONFIG}: the window does not reach a Ray cluster that was started"
            " before this job, and nothing would be captured there; let the job start its own cluster, or start the"
            f" cluster with {ENV_NAME} in its environment"
        )


# -- refusals ------------------------------------------------------------------------------------------------------


def _unresolvable(launch: VerlLaunch) -> Iterator[ConfigError]:
    """verl resolves its config once more, in a Ray actor that has no Hydra."""
    for name, value in launch.written.items():
        for resolver in ("hydra", "now"):
            if isinstance(value, str) and f"${{{resolver}:" in value:
                yield ConfigError(
                    launch.prefix + name,
                    value,
                    f"cannot be read in verl's Ray actors, which have no `{resolver}:` resolver: write a plain value"
                    " (a save_path of null is the run's own folder)",
                )


def _overwritten(key: Key, launch: VerlLaunch) -> Iterator[ConfigError]:
    """The launch's own config files set a key whose value the preset would replace."""
    if launch.own_values is None or not key.sets:
        return
    own = launch.own_values[key.path]
    if own == key.verl_default(launch.own_values.__getitem__):
        return
    if launch.facts.settings.enable:
        error = contradiction(key, launch.facts, own, launch.prefix)
        if error is not None:
            yield error
    elif launch.values[key.path] != own:  # else it is set on the command line, where it still counts
        yield ConfigError(
            key.path, own, f"would be verl's default under {launch.prefix}enable=false: write +{launch.path}=none"
        )


def _unfit_app(launch: VerlLaunch) -> Iterator[ConfigError]:
    if launch.installed is not None and parse_version(launch.installed) < OLDEST:
        yield ConfigError(
            launch.path, launch.option, f"needs verl {OLDEST} or newer, and {launch.installed} is installed"
        )
    engine = launch.values[ENGINE_KEY]
    if engine is not None and engine not in ENGINES:
        allowed = " or ".join(ENGINES)
        yield ConfigError(ENGINE_KEY, engine, f"cannot be windowed by {launch.path}={launch.option}: {allowed} can")


def _window_out_of_reach(launch: VerlLaunch) -> Iterator[ConfigError]:
    """A window that starts behind the last token of the longest response."""
    for window in launch.facts.settings.windows:
        for key, most in _longest_responses(launch):
            if window.start >= most and (key != RESPONSE_KEY or _is_single_turn(launch)):
                yield ConfigError(
                    launch.prefix + (START_KEY if len(launch.facts.settings.windows) == 1 else WINDOWS_KEY),
                    window.start,
                    f"no response gets there: with {key}={launch.values[key]} the last response token is {most - 1}",
                )


def _longest_responses(launch: VerlLaunch) -> Iterator[tuple[str, int]]:
    """Key that bounds a response -> the maximum number of tokens. A context also holds a prompt of a token or more."""
    for key, prompt_tokens in ((RESPONSE_KEY, 0), (CONTEXT_KEY, 1)):
        length = launch.number(key)
        if length is not None:
            yield key, length - prompt_tokens


def _is_single_turn(launch: VerlLaunch) -> bool:
    """Whether a response is one request. Otherwise the engine may make tokens that verl later cuts off."""
    return launch.values[TURNS_KEY] is not True and launch.values[AGENT_KEY] in (None, SINGLE_TURN)


# -- warnings ------------------------------------------------------------------------------------------------------


def _length_warnings(launch: VerlLaunch) -> Iterator[str]:
    bounds = list(_longest_responses(launch))
    if not bounds:
        return
    key, most = min(bounds, key=lambda bound: bound[1])
    for window in launch.facts.settings.windows:
        if window.end is not None and window.end > most:
            yield (
                f"tokens {window}: with {key}={launch.values[key]} the last response token is {most - 1}, so that the"
                f" window is not captured to its end{'' if window.start < most else ', if at all'}"
            )


def _step_warnings(launch: VerlLaunch) -> Iterator[str]:
    steps, total = launch.facts.steps, launch.number(TOTAL_STEPS_KEY)
    if 0 in steps:
        yield f"{launch.prefix}steps={list(steps)}: verl's first step is 1, so that 0 profiles nothing"
    late = [step for step in steps if total is not None and step > total]
    if late:
        yield f"{launch.prefix}steps: {late} will not be reached: the training has {total} steps"


def _rank_warnings(launch: VerlLaunch) -> Iterator[str]:
    facts, gpus = launch.facts, launch.rollout_gpus
    ranks, size = facts.settings.ranks, facts.replica_size
    if facts.settings.all_ranks:
        return
    absent = [rank for rank in ranks if gpus is not None and rank >= gpus]
    if absent:
        yield f"{launch.prefix}ranks: {absent} do not exist: the rollout has {gpus} GPUs, counted from 0"
    replicas = {rank // size for rank in ranks}
    in_engine = engine_ranks(ranks, size)
    if facts.version >= GLOBAL_RANKS_SINCE:
        return  # each server narrows the ranks to those that it owns
    if facts.version < TOKENS_SINCE and facts.settings.arm == "job" and gpus is not None and gpus > size:
        yield (
            f"{launch.prefix}arm=job: no replica is told to profile or not to, so that ranks {list(in_engine)} of each"
            f" of the {gpus // size} replicas capture"
        )
    elif len(replicas) * len(in_engine) != len(ranks):
        yield (
            f"{launch.prefix}ranks={list(ranks)}: an engine knows its ranks within its replica only, so that ranks"
            f" {list(in_engine)} of each of the replicas {sorted(replicas)} capture"
        )


def _finish_warnings(launch: VerlLaunch) -> Iterator[str]:
    """verl runs this command in its training workers, when their profiler stops for the last time."""
    key = next((key for key in FINISH_KEYS if launch.values[key] is not None), None)
    if key is not None and launch.facts.roles == ("rollout",):
        yield (
            f"{key}: verl runs it in training workers that are profiled, and {launch.prefix}roles=['rollout'] profiles"
            f" none, so that it does not run; add actor to {launch.prefix}roles, or run it after the job, which leaves"
            " all captures in one folder"
        )


def _trainer_without_profiling(launch: VerlLaunch) -> str | None:
    """Name of the launch's trainer if it never calls the rollout's start_profile; else None."""
    version = launch.facts.version
    if launch.values[ROLLOUT_NODES_KEY] is not None:  # the rollout has resources of its own: this is no main_ppo
        return "one_step_off_policy" if launch.values[ASYNC_TRAINING_KEY] is None else None
    if TOKENS_SINCE <= version < GLOBAL_RANKS_SINCE and launch.values[USE_V1_KEY] is True:
        return f"verl {version} with trainer.use_v1=True"
    return None
