"""One capture in one line of the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_profiler_conf.capture.manifest import Manifest


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
    return "; ".join([line, *manifest.notes])


def coverage_lines(manifests: Sequence[Manifest]) -> Iterator[str]:
    """For each window of which several requests were followed: the share of their tokens that the captures hold.

    A manifest counts what its process has captured until then, so the last one of each process is taken. The ranks of
    one engine count the same tokens, so there are no numbers of tokens here, only the share.
    """
    captures = Counter(manifest.window for manifest in manifests if manifest.coverage is not None and manifest.rows)
    for window in sorted(captures):
        last = {(m.host, m.pid): m.coverage for m in manifests if m.window == window and m.coverage is not None}
        held, there_are = (sum(counts) for counts in zip(*last.values(), strict=True))
        if held < there_are or (there_are and captures[window] > 1):
            share = f"{100 * held // there_are}%" if 100 * held >= there_are else "less than 1%"
            yield (
                f"tokens {window}: the captures hold {share} of this window's tokens of all requests that had started"
                " when the last capture closed"
            )


def _lost(manifest: Manifest) -> bool:
    """Whether iterations were recorded and their trace is not on disk."""
    return manifest.trace is None and manifest.left_at is None and manifest.backend != "cudart"
