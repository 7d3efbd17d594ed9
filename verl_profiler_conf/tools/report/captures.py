"""The captures that a report is about: manifests and traces below folders, and traces given by name."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX
from verl_profiler_conf.capture.manifest import Manifest
from verl_profiler_conf.tools.trace.capture import rank_files
from verl_profiler_conf.tools.trace.counts import Counts, count
from verl_profiler_conf.tools.trace.errors import ExtraMissingError, TraceError, printable
from verl_profiler_conf.tools.trace.iterations import choose
from verl_profiler_conf.tools.trace.source import Progress

if TYPE_CHECKING:
    from verl_profiler_conf.tools.trace.figures import Analysis

READABLE = (".json", ".json.gz")
"""Endings of the names of traces that can be read. The directories that torch_npu leaves can be read too."""


@dataclass(frozen=True)
class Capture:
    """A manifest, a trace, or both.

    Attributes:
        path: the trace, or the manifest where there is no trace.
        manifest: None for a trace without one.
        analysis: figures of the trace; None without a trace that can be read, or without numpy.
        counts: what the trace holds, where numpy is not installed.
        problems: one line for each thing that is broken or missing, or that contradicts the manifest.
        remarks: sentences that a reader should know. Nothing in them needs a repair.
    """

    path: Path
    manifest: Manifest | None = None
    analysis: Analysis | None = None
    counts: Counts | None = None
    problems: tuple[str, ...] = ()
    remarks: tuple[str, ...] = ()

    @property
    def rank(self) -> int | None:
        """The rank over all replicas if the manifest has it, else the engine's rank, else the rank in the trace."""
        if self.manifest is not None:
            return self.manifest.rank if self.manifest.global_rank is None else self.manifest.global_rank
        return self.analysis.rank if self.analysis is not None else None

    @property
    def title(self) -> str:
        """Which capture this is, in a few words."""
        manifest = self.manifest
        if manifest is None:
            return printable(self.path.name)
        words = [f"{manifest.engine} {manifest.engine_version}".strip(), f"tokens {manifest.window}"]
        words += [f"part {manifest.part}"] if manifest.part > 1 else []
        words += [f"step {manifest.step}"] if manifest.step is not None else [manifest.label] if manifest.label else []
        words += [f"replica {manifest.replica}"] if manifest.replica is not None else []
        return printable(", ".join([*words, f"rank {self.rank}"]))


@dataclass(frozen=True)
class Reading:
    """All captures of a report, and what was wrong on the way.

    Attributes:
        captures: those with a manifest first, the oldest before the others; then traces without one, by name.
        problems: one line each.
        hint: how to get more figures; None where none is missing.
    """

    captures: tuple[Capture, ...]
    problems: tuple[str, ...]
    hint: str | None = None


class _Analyst:
    """Analyses traces. Without numpy it only counts what they hold."""

    def __init__(self, progress: Progress | None) -> None:
        self.hint: str | None = None
        self._progress = progress

    def read(self, path: Path) -> tuple[Analysis | None, Counts | None]:
        if self.hint is None:
            try:
                from verl_profiler_conf.tools.trace.analysis import analyse

                return analyse(path, progress=self._progress), None
            except ExtraMissingError as error:
                self.hint = str(error)
        from verl_profiler_conf.tools.trace.ascend import trace_file

        return None, count(trace_file(path), progress=self._progress)


def read_captures(paths: Sequence[Path], progress: Progress | None = None, run_id: str | None = None) -> Reading:
    """Read what the paths hold: folders with everything below them, and traces.

    In a folder without any manifest, all traces in the folder itself count.

    Args:
        paths: folders, `.json` and `.json.gz` traces, and directories that torch_npu left.
        progress: called with how far the reading of each trace is.
        run_id: of the job whose captures count; None: those of all jobs.
    """
    analyst = _Analyst(progress)
    captures: list[Capture] = []
    problems: list[str] = []
    for path in paths:
        if path.is_dir() and not _is_ascend(path):
            captures += _below(path, analyst, problems, run_id)
        else:
            manifest = rank_files([path])[0].manifest
            captures.append(_read(path, manifest, analyst))
    captures.sort(key=lambda c: (c.manifest is None, c.manifest.created if c.manifest else "", c.path.name))
    problems += [problem for capture in captures for problem in capture.problems]
    return Reading(tuple(captures), tuple(problems), analyst.hint)


def _is_ascend(path: Path) -> bool:
    return (path / "ASCEND_PROFILER_OUTPUT").is_dir() or (path / "trace_view.json").exists()


def _below(folder: Path, analyst: _Analyst, problems: list[str], run_id: str | None) -> Iterator[Capture]:
    found = sorted(folder.rglob(f"*{MANIFEST_SUFFIX}"))
    for path in found:
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except OSError as error:
            problems.append(f"{printable(path, 1000)}: cannot be read: {error.strerror or error}")
        except ValueError as error:
            problems.append(printable(f"{path}: {error}", 500))
        else:
            if run_id in (None, manifest.run_id):
                trace = path.parent / manifest.trace if manifest.trace else None
                yield _read(trace, manifest, analyst) if trace is not None else Capture(path, manifest)
    if not found and run_id is None:
        traces = [path for path in sorted(folder.iterdir()) if path.name.endswith(READABLE) and path.is_file()]
        yield from (_read(path, None, analyst) for path in traces or _ascend_below(folder))


def _ascend_below(folder: Path) -> list[Path]:
    """The folder itself, where torch_npu's trace lies one folder further down."""
    return [folder] if any(folder.glob("*/ASCEND_PROFILER_OUTPUT/trace_view.json")) else []


def _read(path: Path, manifest: Manifest | None, analyst: _Analyst) -> Capture:
    if not path.exists():
        why = "cannot be read: it is not there" if manifest is None else "the manifest names it, but it is not there"
        return Capture(path, manifest, problems=(f"{printable(path, 1000)}: {why}",))
    if manifest is not None and not path.is_dir() and not path.name.endswith(READABLE):
        return Capture(path, manifest)  # memory snapshots and the like
    try:
        analysis, counts = analyst.read(path)
    except TraceError as error:
        if manifest is not None and path.is_dir():  # torch_npu's raw data: whole, and not analysed
            return Capture(path, manifest, remarks=(str(error),))
        return Capture(path, manifest, problems=(str(error),))
    problems = () if manifest is None or path.is_dir() else _disagreements(path, manifest, analysis, counts)
    remarks = analysis.notes if analysis is not None else ()
    return Capture(path, manifest, analysis, counts, problems, remarks)


def _disagreements(path: Path, manifest: Manifest, analysis: Analysis | None, counts: Counts | None) -> tuple[str, ...]:
    listed = [(row.index, row.lo, row.hi) for row in manifest.rows]
    found: list[tuple[int | None, int | None, int | None]] = []
    if analysis is not None and analysis.source == "response_tokens":
        found = [(i.number, i.lo, i.hi) for i in analysis.iterations]
    elif counts is not None:
        found = [(r.name.number, r.name.lo, r.name.hi) for r in choose(counts.ranges, "response_tokens")]
    if listed == found:
        return ()
    return (
        f"{printable(path, 1000)}: its ranges are not the manifest's rows ({len(found)} ranges, {len(listed)} rows)",
    )
