"""One capture in one line of the log."""

from __future__ import annotations

import logging
from pathlib import Path

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.capture.notes import skipped_words


def log_capture(log: logging.Logger, manifest: Manifest, folder: Path, url: str | None = None) -> None:
    """One line for one capture: a warning where its trace was lost."""
    log.log(logging.WARNING if _lost(manifest) else logging.INFO, "%s", capture_line(manifest, folder, url))


def capture_line(manifest: Manifest, folder: Path, url: str | None = None) -> str:
    """One capture in one line, with its label in front if it has one.

    Example: `tokens [20, 80): 60 iterations of transformers, rank 0 -> /run/profile/x.pt.trace.json.gz (182,044 bytes)`
    """
    count = len(manifest.captured)
    part = f" (part {manifest.part})" if manifest.part > 1 else ""
    label = f"{manifest.label}: " if manifest.label else ""
    line = (
        f"{label}tokens {manifest.window}{part}: {count} iteration{'' if count == 1 else 's'} of {manifest.engine},"
        f" rank {manifest.rank if manifest.global_rank is None else manifest.global_rank}"
    )
    if manifest.trace:
        line += f" -> {url or folder / manifest.trace} ({manifest.trace_bytes:,} bytes)"
    elif manifest.left_at:
        line += f" -> {manifest.left_at} ({manifest.trace_bytes:,} bytes)"
    elif not _lost(manifest):
        line += ", recorded by nsys"
    if manifest.closed_by not in (None, "window", "gap"):
        last = max(row.hi for row in manifest.rows) - 1
        line += f"; closed at token {last} by {manifest.closed_by}"
    if manifest.skipped and manifest.part == 1:
        line += f"; {skipped_words(manifest.skipped)}"
    return "; ".join([line, *manifest.notes])


def _lost(manifest: Manifest) -> bool:
    """Whether iterations were recorded and their trace is not on disk."""
    return manifest.trace is None and manifest.left_at is None and manifest.backend != "cudart"
