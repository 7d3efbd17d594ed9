"""The window in the counters of every engine, as rows of a table for `verl-profiler plan`."""

from __future__ import annotations

from dataclasses import dataclass

from verl_profiler_conf.core.engine_facts import AUTO
from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.iterations import CounterPlan, captured, plain_counters
from verl_profiler_conf.core.iterations.planning import ENGINES
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import MAX_TOKEN, TokenWindow
from verl_profiler_conf.counters.plan import WORKER_OF_DEVICE, counter_plan, installed_version

KNOWN: tuple[tuple[str, str, str], ...] = (
    ("vllm", "0.33.0", "gpu"),
    ("vllm", "0.12.0", "gpu"),
    ("vllm", "0.11.2", "gpu"),
    ("vllm", "0.20.2rc1", "npu"),
    ("vllm", "0.18.0", "npu"),
    ("sglang", "0.5.23", "gpu"),
    ("sglang", "0.5.15", "gpu"),
    ("sglang", "0.5.3", "gpu"),
    ("sglang", "0.4.9", "gpu"),
    ("tensorrt_llm", "1.4.0", "gpu"),
    ("tensorrt_llm", "1.2.0", "gpu"),
)
"""Engine, version and kind of worker: one version for each way of counting, newest first."""


@dataclass(frozen=True)
class PlanRow:
    """One engine, one version, one window.

    Attributes:
        engine: its name, with the kind of worker where that matters: `vllm (npu)`.
        version: as released.
        installed: whether this version is installed in this environment.
        window: the window.
        counters: for example `delay_iterations=21 max_iterations=60`; `-` when there is nothing to set.
        fit: `exact`, `shifted by ...` or `cannot be`, followed by ` if ...` where something is assumed.
        reason: one sentence.
        plain: the tokens that counters without correction (delay = start, max = end - start) would capture.
    """

    engine: str
    version: str
    installed: bool
    window: str
    counters: str
    fit: str
    reason: str
    plain: str


def plan_table(settings: Settings, *, forward_count: int | None = None) -> list[PlanRow]:
    """Rows for each window and engine. The version in the settings, or the installed one, comes first.

    When the settings name an engine, only its rows are made. No engine is imported.

    Args:
        forward_count: forwards that the engine has run before start_profile; None: unknown.

    Raises:
        ConfigError: the settings name an engine that has no counters.
    """
    named = settings.engine.get("name")
    if named not in (None, AUTO, *ENGINES):
        raise ConfigError("engine.name", named, f"has no counters; must be one of {', '.join(ENGINES)}")
    engines = [named] if named in ENGINES else list(ENGINES)
    rows = []
    for window in settings.windows:
        for engine in engines:
            stated = settings.engine.get("version") if named == engine else None
            worker = WORKER_OF_DEVICE.get(settings.device, "gpu")
            present = installed_version(engine, worker)
            own = present if stated in (None, AUTO) else stated
            if own is not None:
                rows.append(_row(settings, window, engine, own, worker, forward_count, installed=own == present))
            for known, version, worker_kind in KNOWN:
                if known == engine and (version, worker_kind) != (own, worker):
                    rows.append(_row(settings, window, engine, version, worker_kind, forward_count, installed=False))
    return rows


def _row(
    settings: Settings,
    window: TokenWindow,
    engine: str,
    version: str,
    worker: str,
    forward_count: int | None,
    *,
    installed: bool,
) -> PlanRow:
    answer = counter_plan(settings, engine, window=window, version=version, worker=worker, forward_count=forward_count)
    plain = captured(
        engine,
        version,
        plain_counters(window, engine),
        answer.prefill_iteration,
        worker=None if engine == "tensorrt_llm" else worker,
        forward_count=forward_count or 0,
    )
    return PlanRow(
        engine=engine if worker == "gpu" else f"{engine} ({worker})",
        version=version,
        installed=installed,
        window=str(window),
        counters=" ".join(f"{name}={value}" for name, value in answer.values.items() if value is not None) or "-",
        fit=_fit(answer),
        reason=answer.reason,
        plain=_plain(plain, answer, settings),
    )


def _fit(answer: CounterPlan) -> str:
    return f"{answer.fit}, if {' and '.join(answer.assumes)}" if answer.assumes else str(answer.fit)


def _plain(tokens: range, answer: CounterPlan, settings: Settings) -> str:
    if settings.engine.get("num_speculative_tokens") and answer.fit.kind == "cannot":
        return "unknown: drafts are accepted or not"
    if answer.engine == "tensorrt_llm" or not tokens:
        return "none"
    return f"[{tokens.start}, {'end' if tokens.stop > MAX_TOKEN else tokens.stop})"
