"""One capture in one line of the log."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.capture.manifest_notes import skipped_clause

_EARLY_ENDS = {
    "request_end": "the response ended",
    "stop_profile": "stop_profile was called",
    "job_end": "the job ended",
    "error": "a failure ended the capture",
}
"""Why a capture holds less than its window, by `closed_by`. `max_iterations` is not here: the user asked for it."""


def log_capture(log: logging.Logger, manifest: Manifest, folder: Path, url: str | None = None) -> None:
    """One line for one capture: a warning where its trace was lost, or holds less than was asked for."""
    is_warning = _is_lost(manifest) or _early_end(manifest) is not None
    log.log(logging.WARNING if is_warning else logging.INFO, "%s", capture_line(manifest, folder, url))


def capture_line(manifest: Manifest, folder: Path, url: str | None = None) -> str:
    """One capture in one line, with its label in front if it has one.

    Examples:
        `tokens [20, 80): 60 iterations of transformers, rank 0 -> /run/profile/x.pt.trace.json.gz (182,044 bytes)`

        `captured tokens 20-29 of [20, 80): the response ended after token 29; 10 iterations of vllm, rank 0 -> ...`
    """
    rows = manifest.captured
    part = f" (part {manifest.part})" if manifest.part > 1 else ""
    label = f"{manifest.label}: " if manifest.label else ""
    end = _early_end(manifest)
    if end is None or not rows:
        line = f"{label}tokens {manifest.window}{part}: "
    else:
        first, last = min(row.lo for row in rows), max(row.hi for row in rows) - 1
        span = f"token {first}" if first == last else f"tokens {first}-{last}"
        line = f"{label}captured {span} of {manifest.window}{part}: {end} after token {last}; "
    rank = manifest.rank if manifest.global_rank is None else manifest.global_rank
    line += f"{len(rows)} iteration{'' if len(rows) == 1 else 's'} of {manifest.engine}, rank {rank}"
    if manifest.trace:
        line += f" -> {url or folder / manifest.trace} ({manifest.trace_bytes:,} bytes)"
    elif manifest.left_at:
        line += f" -> {manifest.left_at} ({manifest.trace_bytes:,} bytes)"
    elif not _is_lost(manifest):
        line += ", recorded by nsys"
    if manifest.closed_by == "max_iterations":
        line += "; ended by max_iterations"
    if manifest.skipped and manifest.part == 1:
        line += f"; {skipped_clause(manifest.skipped)}"
    return "; ".join([line, *manifest.notes])


def coverage_lines(manifests: Sequence[Manifest]) -> Iterator[str]:
    """For each window of which several requests were followed: the share of their tokens that the captures hold.

    A manifest counts what its process has captured until then, so the last one of each process is taken. The ranks of
    one engine count the same tokens, so there are no numbers of tokens here, only the share.
    """
    captures = Counter(manifest.window for manifest in manifests if manifest.coverage is not None and manifest.has_rows)
    for window in sorted(captures):
        last = {(m.host, m.pid): m.coverage for m in manifests if m.window == window and m.coverage is not None}
        captured, existing = (sum(counts) for counts in zip(*last.values(), strict=True))
        if captured < existing or (existing and captures[window] > 1):
            share = f"{100 * captured // existing}%" if 100 * captured >= existing else "less than 1%"
            yield (
                f"tokens {window}: the captures hold {share} of this window's tokens of all requests that had started"
                " when the last capture closed"
            )


def _early_end(manifest: Manifest) -> str | None:
    """What ended the capture before the end of its window. None where the capture holds what was asked for.

    A window without an end is captured as asked, unless a failure came. Under `track: any` and `all` a capture ends
    with the requests that run at that moment, and `coverage` says what the captures hold.
    """
    end, rows = manifest.window.end, manifest.captured
    if end is None or manifest.track != "lead":
        return _EARLY_ENDS["error"] if manifest.closed_by == "error" else None
    if rows and max(row.hi for row in rows) >= end:
        return None  # all is recorded; a trace that was lost afterwards has a note of its own
    return _EARLY_ENDS.get(manifest.closed_by or "")


def _is_lost(manifest: Manifest) -> bool:
    """Whether iterations were recorded and their trace is not on disk."""
    return manifest.trace is None and manifest.left_at is None and manifest.backend != "cudart"
