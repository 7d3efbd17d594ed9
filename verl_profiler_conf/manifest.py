"""What a capture was: a manifest beside each trace, and how both are named and written.

Pure standard library. Everything here works on a folder that other processes, on other machines too, write to at the
same time.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import socket
import uuid
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from verl_profiler_conf.window import TokenWindow

SCHEMA_VERSION = 1
"""Rises when a field of the manifest changes its meaning; new fields alone do not raise it."""

SUFFIX = ".manifest.json"


@dataclass
class Row:
    """One captured iteration.

    Attributes:
        index: of the iteration, 0-based, counted by the session.
        lo: first response token that the tracked request made in it.
        hi: one past the last.
        requests: size of the batch.
        tokens: response tokens that the whole batch made.
        wall_ns: from the begin of the iteration to its end, in nanoseconds.
        gap: the tracked request made no token of the window here; the capture only stayed open.
        request: id of the tracked request.
    """

    index: int
    lo: int
    hi: int
    requests: int
    tokens: int
    wall_ns: int
    gap: bool = False
    request: str | None = None


def _host() -> str:
    return socket.gethostname()


def _now() -> str:
    return datetime.now(timezone.utc).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _package_version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("verl-profiler-conf")
    except PackageNotFoundError:  # run from a checkout
        return "unknown"


@dataclass
class Manifest:
    """One capture, or one window that was never reached.

    Attributes:
        window: response tokens asked for.
        engine: name, as in the file names.
        engine_version: as the engine says it.
        rank: of the process within the engine, or of torch.distributed.
        track: whose tokens counted: `lead`, `any` or `all`.
        tracked: ids of the requests whose tokens were followed, in order of appearance.
        rows: one per captured iteration, gaps included.
        opened_by: `window`; None when it never opened.
        closed_by: `window`, `request_end`, `stop_profile`, `max_iterations`, `job_end`, `gap` (a long pause ended this
            part), `error`; None when it never opened.
        part: 1, 2, ... of the window's capture.
        trace: file name beside the manifest; None when there is none.
        trace_bytes: its size.
        device_events: kernels and copies in it; None when unknown or without an accelerator.
        furthest_token: largest response token index seen so far, -1 when none.
        stall_ns: how long ending the recording held the rollout, in nanoseconds.
        notes: sentences on what a reader would not expect.
        run_id: the job's; captures of several processes belong together by it.
        label: as in the file names, when the caller gave one.
        device: `cuda`, `npu`, `cpu`, or what was asked for.
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
    rows: list[Row] = field(default_factory=list)
    opened_by: str | None = None
    closed_by: str | None = None
    part: int = 1
    trace: str | None = None
    trace_bytes: int = 0
    device_events: int | None = None
    furthest_token: int = -1
    stall_ns: int = 0
    notes: list[str] = field(default_factory=list)
    run_id: str = ""
    label: str | None = None
    device: str = ""
    backend: str = ""
    host: str = field(default_factory=_host)
    pid: int = field(default_factory=os.getpid)
    created: str = field(default_factory=_now)
    version: str = field(default_factory=_package_version)
    schema: int = SCHEMA_VERSION

    @property
    def captured(self) -> list[Row]:
        """The rows that made tokens of the window: `rows` without the gaps."""
        return [row for row in self.rows if not row.gap]

    def to_json(self) -> str:
        """One row a line, so that a manifest can be read as it is; ends with a newline."""
        raw = asdict(self)
        del raw["window"]
        rows = raw.pop("rows")
        window = json.dumps([self.window.start, self.window.end])
        text = f'{{\n  "window": {window},' + json.dumps(raw, indent=2, ensure_ascii=False)[1:]
        lines = ",\n".join("    " + json.dumps(row, ensure_ascii=False) for row in rows)
        return text[:-2] + ',\n  "rows": [' + (f"\n{lines}\n  " if lines else "") + "]\n}\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Manifest:
        """Read one, also of a newer version of this package: fields not known here are passed over.

        Raises:
            ValueError: not JSON, or not a manifest; one line.
        """
        try:
            raw = json.loads(text)
            start, end = raw["window"]
            known = _known(cls, raw)
            known["window"] = TokenWindow.parse(start, end)
            known["rows"] = [Row(**_known(Row, row)) for row in raw.get("rows", [])]
            return cls(**known)
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a manifest ({type(error).__name__}: {error})") from error


def _known(kind: type, raw: dict[str, Any]) -> dict[str, Any]:
    names = {f.name for f in fields(kind)}
    return {key: value for key, value in raw.items() if key in names}


def stem(engine: str, window: TokenWindow, rank: int, pid: int, label: str | None = None) -> str:
    """`<engine>_tokens<start>-<end>_rank<r>_pid<pid>[_<label>]`: the name of a capture but for its number."""
    back = f"_{_file_safe(label)}" if label else ""
    return f"{_file_safe(engine)}_tokens{window.label}_rank{rank}_pid{pid}{back}"


def _file_safe(text: str) -> str:
    return re.sub(r"[^A-Za-z0-9._=+-]+", "-", text).strip("-.")[:80] or "x"


def reserve_stem(folder: Path, name: str) -> Path:
    """`<folder>/<name>_<n>` with the smallest n from 1 that neither a file there nor another process uses.

    Two containers that share the folder may well have the same pid. The claim is a hidden marker file, made
    exclusively; `write_manifest` takes it away once the manifest holds the name.

    Raises:
        OSError: the folder cannot be written.
    """
    number = 0
    while True:
        number += 1
        path = folder / f"{name}_{number}"
        marker = _marker(path)
        try:
            os.close(os.open(marker, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            continue
        # looked at after the claim: a rival drops its marker only when its manifest is there to be seen
        if not _taken(path):
            return path
        marker.unlink(missing_ok=True)


def _marker(path: Path) -> Path:
    return path.with_name(f".{path.name}.reserved")


def _taken(path: Path) -> bool:
    with os.scandir(path.parent) as entries:
        return any(
            entry.name == path.name or entry.name.startswith((path.name + ".", path.name + "_ascend"))
            for entry in entries
        )


def manifest_path(path: Path) -> Path:
    """The manifest's file for a reserved stem."""
    return path.with_name(path.name + SUFFIX)


def write_manifest(manifest: Manifest, path: Path, *, replace: bool = False) -> Path:
    """Write `<path>.manifest.json`, whole or not at all.

    Args:
        manifest: what to write.
        path: the stem, as `reserve_stem` gave it.
        replace: this process wrote the older one and means to bring it up to date.

    Returns:
        The file.

    Raises:
        FileExistsError: there is one already, and `replace` is false.
        OSError: the disk refused. The stem is given back all the same: the job's end waits for every claim.
    """
    target = manifest_path(path)
    try:
        write_atomically(target, manifest.to_json().encode(), replace=replace)
    finally:
        _marker(path).unlink(missing_ok=True)
    return target


def write_atomically(path: Path, data: bytes, *, replace: bool = False) -> None:
    """Write a file that nobody ever sees half: under a temporary name in the same folder, synced, then renamed.

    Raises:
        FileExistsError: `path` exists and `replace` is false; it is left as it was.
        OSError: the disk refused; nothing is left behind.
    """
    with temporary_name(path) as temporary:
        with temporary.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        publish(temporary, path, replace=replace)


@contextlib.contextmanager
def temporary_name(path: Path) -> Iterator[Path]:
    """A hidden name beside `path`, for this process alone; whatever file bears it at the end is removed."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}-{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temporary
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def publish(temporary: Path, path: Path, *, replace: bool = False) -> None:
    """Give a finished file its name, in one step.

    Raises:
        FileExistsError: `path` exists and `replace` is false.
    """
    if replace:
        temporary.replace(path)
        return
    try:
        os.link(temporary, path)  # unlike rename, link refuses to replace
    except FileExistsError:
        raise
    except OSError:
        # no hard links on this file system (some network and object-store mounts): the reserved stem keeps rivals out
        if path.exists():
            raise FileExistsError(f"{path} exists already") from None
        temporary.rename(path)


def gather(folder: Path, run_id: str) -> list[Manifest]:
    """The manifests of one job in a folder, oldest first. Files that cannot be read are none of its manifests."""
    found = []
    for path in sorted(folder.glob(f"*{SUFFIX}")):
        try:
            manifest = Manifest.from_json(path.read_bytes())
        except (OSError, ValueError):
            continue
        if manifest.run_id == run_id:
            found.append(manifest)
    return sorted(found, key=lambda m: (m.created, m.rank, m.window.start, m.part))
