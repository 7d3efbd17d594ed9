"""What a job logs of its window when it starts."""

from __future__ import annotations

import logging

from verl_profiler_conf.core.settings import FOREIGN_CONTENTS, OPTIONS, Settings

log = logging.getLogger(__name__)


def announce(settings: Settings, url: str | None) -> None:
    """Log the window, and what may surprise the user."""
    from verl_profiler_conf.capture.backends.detect import detect_device

    device = detect_device(settings.device)
    windows = ", ".join(map(str, settings.windows))
    if settings.mapping == "tokens":
        where = settings.save_path if url is None else f"{settings.save_path}, and at the job's end to {url}"
        log.info("waiting for response tokens %s on %s; captures go to %s", windows, device, where)
    for window in settings.windows:
        if window.is_open and settings.max_iterations is None:
            log.warning("the window %s has no end: its trace grows as long as the response does", window)
    if settings.device not in ("auto", "cpu") and detect_device() != settings.device:
        log.warning(
            "device=%s, and this process finds no such device: only engine processes on other machines could capture",
            settings.device,
        )
    devices = OPTIONS[settings.option].devices
    if device not in devices:
        log.warning(
            "%s needs %s, and this process finds none: only engine processes on other machines could capture",
            settings.option,
            devices[-1],
        )
    foreign = [item for item in settings.contents if item in FOREIGN_CONTENTS[device]]
    if foreign:
        log.warning("contents %s cannot be recorded on %s, the device of this process", ", ".join(foreign), device)
    if settings.mapping == "iterations":
        _announce_counters(settings)


def _announce_counters(settings: Settings) -> None:
    from verl_profiler_conf.counters.plan import counter_plan

    for engine in ("vllm", "sglang"):
        if settings.engine.get("name", engine) in (engine, "auto"):
            plan = counter_plan(settings, engine)
            log.log(logging.INFO if plan.fit.exact and not plan.assumes else logging.WARNING, "%s", plan)
