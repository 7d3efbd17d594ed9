"""The captures in a folder: each manifest, held against the trace beside it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.tools.report.trace import Trace, TraceError, read_trace

_READABLE = (".json", ".json.gz")


@dataclass(frozen=True)
class Capture:
    """One manifest, its trace where it has one that can be read, and what is wrong with the two."""

    path: Path
    manifest: Manifest
    trace: Trace | None
    problems: tuple[str, ...]


def read_captures(folder: Path) -> tuple[list[Capture], list[str]]:
    """All captures below `folder`, oldest first, and one line for each file that is broken."""
    captures: list[Capture] = []
    broken: list[str] = []
    for path in sorted(folder.rglob(f"*{MANIFEST_SUFFIX}")):
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except (OSError, ValueError) as error:
            broken.append(f"{path}: {error}")
            continue
        captures.append(_capture(path, manifest))
    captures.sort(key=lambda capture: (capture.manifest.created, capture.path.name))
    broken += [problem for capture in captures for problem in capture.problems]
    return captures, broken


def _capture(path: Path, manifest: Manifest) -> Capture:
    if manifest.trace is None:
        return Capture(path, manifest, None, ())
    file = path.parent / manifest.trace
    if not file.name.endswith(_READABLE):
        missing = () if file.exists() else (f"{file}: the manifest names it, but it is not there",)
        return Capture(path, manifest, None, missing)
    try:
        trace = read_trace(file)
    except TraceError as error:
        return Capture(path, manifest, None, (str(error),))
    return Capture(path, manifest, trace, tuple(_disagreements(manifest, trace)))


def _disagreements(manifest: Manifest, trace: Trace) -> list[str]:
    said = [(row.index, row.lo, row.hi) for row in manifest.rows]
    found = [(r.iteration, r.lo, r.hi) for r in trace.ranges]
    if said == found:
        return []
    return [f"{trace.path}: its ranges are not the manifest's rows ({len(found)} ranges, {len(said)} rows)"]
