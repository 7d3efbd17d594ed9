"""The manifest: a JSON file beside each trace that says what the trace holds."""

from __future__ import annotations

import functools
import json
import os
import socket
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from verl_profiler_conf.capture.files import MANIFEST_SUFFIX, manifest_path, marker, write_atomically
from verl_profiler_conf.core.window import TokenWindow

SCHEMA_VERSION = 1
"""Rises when a field changes its meaning. New fields alone do not raise it."""


@dataclass
class IterationRecord:
    """One captured iteration.

    Attributes:
        index: number of the iteration, 0-based, counted by the session.
        lo: first response token that the tracked request made.
        hi: one past the last.
        requests: size of the batch.
        tokens: response tokens that the whole batch made.
        wall_ns: from begin to end of the iteration, in nanoseconds.
        gap: the tracked request made no token of the window; the capture only stayed open.
        request: id of the tracked request.
        operators: host operators that the trace holds of the iteration; None where the trace was not read.
        kernels: kernels that the iteration launched; None without a trace of an accelerator.
        device_ns: durations of its kernels, copies and memsets, added up; None without a trace of an accelerator.
    """

    index: int
    lo: int
    hi: int
    requests: int
    tokens: int
    wall_ns: int
    gap: bool = False
    request: str | None = None
    operators: int | None = None
    kernels: int | None = None
    device_ns: int | None = None


def host_name() -> str:
    """Of this machine."""
    return socket.gethostname()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="microseconds").replace("+00:00", "Z")


@functools.cache  # read when a window opens at the latest: at its end the process may have no descriptors left
def _package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl-profiler-conf")
    except PackageNotFoundError:  # a checkout that is not installed
        return "unknown"


@dataclass
class Manifest:
    """One capture, or one window of which there is no capture.

    Attributes:
        window: response tokens asked for.
        engine: name, as in the file names.
        engine_version: as the engine reports it.
        rank: of the process within the engine, or of torch.distributed.
        track: whose tokens counted: `lead`, `any` or `all`.
        tracked: ids of the requests whose tokens were followed, in order of appearance.
        rows: one per captured iteration, gaps included.
        opened_by: `window`; None when nothing was opened.
        closed_by: `window`, `request_end`, `stop_profile`, `max_iterations`, `job_end`, `error`; None when nothing was
            opened. The rest of the window may be a further part after `part` (this one is as long as `part_iterations`
            allows), `gap` (a long pause of the tracked request), `other_profiler` (other code prepared a profiler in
            the process) and `thread` (the loop changes its thread).
        part: 1, 2, ... of the window's capture.
        final: false while its process has not told what became of the window: the window is still waited for, or its
            capture is open. The process replaces the manifest later, unless it is killed.
        trace: file name beside the manifest; None when there is none.
        trace_bytes: its size.
        left_at: `<node>:<path>` of a trace that was not brought here from the node that wrote it; `trace` is then None.
        device_events: kernels and copies in it; None when unknown or without an accelerator.
        furthest_token: largest response token index seen so far, -1 when none was seen.
        coverage: under `track: any` and `all`, how many tokens of the window are in captures so far, and how many of
            them there are. Each request's tokens count by themselves, and a request that still ran when the capture
            closed counts as one that makes them all. None under `lead`, and where the window has no end.
        other_iterations: iterations of other loops of the process that ran, wholly or in part, during the capture.
        skip_captures: how many times the window was to go by uncaptured first, in each arming.
        skipped: how many times it had gone by when the manifest was made.
        opening_stall_ns: how long the rollout waited until the recording had begun, its preparation included, in
            nanoseconds.
        stall_ns: how long the rollout waited until the recording had ended and was handed to the writer, its name
            included, in nanoseconds.
        notes: sentences about what a reader would not expect.
        run_id: of the job. Captures of several processes belong together by it.
        label: as in the file names; None when the caller gave none.
        step: of the job, as in the label; None: the label names none.
        replica: index of the engine, in a job with several; None: not known.
        global_rank: of the process over all replicas; None: not known.
        node: address of its machine in the cluster; None: not known.
        device: `cuda`, `npu`, `xpu`, `cpu`, or what was asked for.
        backend: name of the device profiler.
        host: machine.
        pid: process.
        created: when the manifest was made, UTC, ISO 8601.
        version: of this package.
        schema: of this file.
    """

    window: TokenWindow
    engine: str
    engine_version: str
    rank: int
    track: str
    tracked: list[str] = field(default_factory=list)
    rows: list[IterationRecord] = field(default_factory=list)
    opened_by: str | None = None
    closed_by: str | None = None
    part: int = 1
    final: bool = True
    trace: str | None = None
    trace_bytes: int = 0
    left_at: str | None = None
    device_events: int | None = None
    furthest_token: int = -1
    coverage: tuple[int, int] | None = None
    skip_captures: int = 0
    skipped: int = 0
    opening_stall_ns: int = 0
    stall_ns: int = 0
    other_iterations: int = 0
    notes: list[str] = field(default_factory=list)
    run_id: str = ""
    label: str | None = None
    step: int | None = None
    replica: int | None = None
    global_rank: int | None = None
    node: str | None = None
    device: str = ""
    backend: str = ""
    host: str = field(default_factory=host_name)
    pid: int = field(default_factory=os.getpid)
    created: str = field(default_factory=_now)
    version: str = field(default_factory=_package_version)
    schema: int = SCHEMA_VERSION

    @property
    def has_rows(self) -> bool:
        """Whether anything was captured. Does not read rows that were not read yet."""
        return "_rows_text" in self.__dict__ or bool(self.rows)

    @property
    def captured(self) -> list[IterationRecord]:
        """The rows that made tokens of the window: `rows` without the gaps."""
        return [row for row in self.rows if not row.gap]

    def to_json(self) -> str:
        """JSON with one row a line, so that it is easy to read; ends with a newline."""
        raw = asdict(self)
        del raw["window"]
        rows = raw.pop("rows")
        window = json.dumps([self.window.start, self.window.end])
        text = f'{{\n  "window": {window},' + json.dumps(raw, indent=2, ensure_ascii=False)[1:]
        lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)
        return text[:-2] + ',\n  "rows": [' + (f"\n{lines}\n  " if lines else "") + "]\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read a manifest, also one of a newer version of this package: unknown fields are ignored.

        Raises:
            ValueError: the text is no JSON, or no manifest; one line.
        """
        try:
            raw = json.loads(text)
            rows = raw.pop("rows", [])
            manifest = cls._of(raw)
            manifest.rows = _records(rows)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _not_a_manifest(error) from error
        return manifest

    @classmethod
    def from_json_lazily(cls, text: bytes) -> Manifest:
        """As `from_json`, but its rows are read when they are asked for: a job's end looks at thousands of manifests,
        and at the rows of a few.

        Raises:
            ValueError: as `from_json`. Where only the rows are wrong, `rows` raises it.
        """
        head, separator, rows = text.rpartition(_ROWS)
        if not separator or not rows.endswith(_END):  # somebody else has written it
            return cls.from_json(text)
        try:
            manifest = cls._of(json.loads(head + b"}"))
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
            raise _not_a_manifest(error) from error
        if len(rows) > len(_END):
            del manifest.rows
            manifest.__dict__["_rows_text"] = b"[" + rows.removesuffix(b"}\n")
        return manifest

    @classmethod
    def _of(cls, raw: dict[str, Any]) -> Manifest:
        start, end = raw["window"]
        known = _known(cls, raw)
        known["window"] = TokenWindow.parse(start, end)
        if known.get("coverage") is not None:
            held, asked = known["coverage"]
            known["coverage"] = (int(held), int(asked))
        return cls(**known)

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:  # only where `from_json_lazily` has left the rows unread
            text = self.__dict__.get("_rows_text") if name == "rows" else None
            if text is None:
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            try:
                self.rows = _records(json.loads(text))
            except (ValueError, TypeError, AttributeError, RecursionError) as error:
                raise _not_a_manifest(error) from error
            del self.__dict__["_rows_text"]
            return self.rows


_ROWS = b',\n  "rows": ['
_END = b"]\n}\n"
"""What stands around the rows in `to_json`."""


def _records(rows: list[dict[str, Any]]) -> list[IterationRecord]:
    return [IterationRecord(**_known(IterationRecord, row)) for row in rows]


def _not_a_manifest(error: Exception) -> ValueError:
    return ValueError(f"not a manifest ({type(error).__name__}: {error})")


def _known(kind: type, raw: dict[str, Any]) -> dict[str, Any]:
    names = _names(kind)
    return {key: value for key, value in raw.items() if key in names}


@functools.cache
def _names(kind: type) -> frozenset[str]:
    return frozenset(f.name for f in fields(kind))


def write_manifest(manifest: Manifest, path: Path, *, replace: bool = False, sync: bool = True) -> Path:
    """Write `<path>.manifest.json`, whole or not at all.

    Args:
        manifest: what to write.
        path: the stem, as `reserve_stem` returned it.
        replace: overwrite an older one. Only for a manifest that this process wrote itself.
        sync: see `write_atomically`.

    Returns:
        The file.

    Raises:
        FileExistsError: it exists, and `replace` is false.
        OSError: the disk refused. The claim on the stem is removed all the same: the job's end waits for claims.
    """
    target = manifest_path(path)
    try:
        # JSON spells a lone surrogate, which UTF-8 does not have, as Python's `backslashreplace` does
        data = manifest.to_json().encode(errors="backslashreplace")
        write_atomically(target, data, replace=replace, sync=sync)
    finally:
        marker(path).unlink(missing_ok=True)
    return target


def gather(folder: Path, run_id: str) -> list[Manifest]:
    """The manifests of one job in a folder, oldest first. Files that cannot be read are ignored.

    The rows of a manifest are read when they are asked for.
    """
    found = []
    for name in manifest_names(folder):
        try:
            with open(os.path.join(folder, name), "rb", buffering=0) as file:  # noqa: PTH118, PTH123 - thousands of them
                manifest = Manifest.from_json_lazily(file.readall())
        except (OSError, ValueError):
            continue
        if manifest.run_id == run_id:
            found.append(manifest)
    return sorted(found, key=lambda m: (m.created, m.rank, m.window.start, m.part))


def manifest_names(folder: Path) -> list[str]:
    """File names of the manifests in a folder, sorted; none where there is no folder."""
    try:
        return sorted(name for name in os.listdir(folder) if name.endswith(MANIFEST_SUFFIX) and name[0] != ".")  # noqa: PTH208
    except OSError:
        return []
