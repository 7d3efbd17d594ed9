"""What torch_npu leaves: a directory, of which `trace_view.json` and `kernel_details.csv` are read."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from verl_profiler_conf.tools.trace.errors import TraceError, printable
from verl_profiler_conf.tools.trace.events import MAX_DURATION_US, MAX_TIME_US

OUTPUT = "ASCEND_PROFILER_OUTPUT"
TRACE = "trace_view.json"
KERNELS = "kernel_details.csv"

WORK = ("AI_CORE", "AI_VECTOR_CORE", "MIX_AIC", "MIX_AIV", "AI_CPU", "DSA", "KERNEL_", "SDMA", "PCIE_DMA", "MEMCPY")
"""The begins of task types that compute or move data. Tasks of other types wait, notify or record."""

_NAMES = ("Name", "Op Name")
_STARTS = ("Start Time(us)", "Task Start Time(us)")
_DURATIONS = ("Duration(us)", "Task Duration(us)")
_CORES = ("Accelerator Core", "Task Type")
_STREAMS = ("Stream ID", "Stream Id")


@dataclass(frozen=True, slots=True)
class AscendKernel:
    """A row of `kernel_details.csv`: `core` is what it ran on, such as `AI_CORE`; times in microseconds."""

    name: str
    core: str
    stream: str
    start_us: float
    dur_us: float


def trace_file(path: Path) -> Path:
    """The trace itself, where `path` is a directory that torch_npu left; else `path`.

    Raises:
        TraceError: a directory without a trace: torch_npu's data before its analysis, or data of another kind.
    """
    if not path.is_dir():
        return path
    for folder in (path / OUTPUT, path):
        if (folder / TRACE).exists():
            return folder / TRACE
    found = sorted(path.glob(f"*/{OUTPUT}/{TRACE}"))
    if len(found) == 1:
        return found[0]
    if found:
        raise TraceError(f"{printable(path)}: {len(found)} traces in it: give one")
    if any(path.glob("PROF_*")) or any(path.glob("FRAMEWORK")):
        raise TraceError(
            f"{printable(path)}: not analysed yet: run torch_npu.profiler.profiler.analyse on it, or set analysis: true"
        )
    raise TraceError(f"{printable(path)}: a directory without {OUTPUT}/{TRACE}")


def kernel_details(trace: Path) -> Path | None:
    """The table of kernels beside a `trace_view.json`; None where there is none."""
    beside = trace.with_name(KERNELS)
    return beside if trace.name == TRACE and beside.is_file() else None


def read_kernel_details(path: Path) -> Iterator[AscendKernel]:
    """The kernels, in the order of the file, one at a time.

    Raises:
        TraceError: no table of kernels, or a row that cannot be read; one line, with the number of the row's.
    """
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = csv.reader(file)
            heads = [head.strip() for head in next(rows, [])]
            name, start, dur = (_column(path, heads, names) for names in (_NAMES, _STARTS, _DURATIONS))
            core, stream = (next((heads.index(n) for n in names if n in heads), None) for names in (_CORES, _STREAMS))
            for row in rows:
                if not row:
                    continue
                if len(row) <= max(name, start, dur):
                    raise TraceError(f"{printable(path)}: line {rows.line_num} is cut off")
                yield AscendKernel(
                    row[name].strip(),
                    row[core].strip() if core is not None and core < len(row) else "",
                    row[stream].strip() if stream is not None and stream < len(row) else "",
                    _number(path, rows.line_num, row[start], MAX_TIME_US),
                    _number(path, rows.line_num, row[dur], MAX_DURATION_US),
                )
    except OSError as error:
        raise TraceError(f"{printable(path)}: cannot be read: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise TraceError(f"{printable(path)}: its text is not UTF-8") from None
    except csv.Error as error:
        raise TraceError(f"{printable(path)}: no whole table: {printable(error)}") from None


def _column(path: Path, heads: list[str], names: tuple[str, ...]) -> int:
    for name in names:
        if name in heads:
            return heads.index(name)
    raise TraceError(f"{printable(path)}: no table of kernels: it has no column {names[0]}")


def _number(path: Path, line: int, text: str, most: float) -> float:
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if not abs(number) <= most:
        raise TraceError(f"{printable(path)}: line {line}: {printable(text.strip(), 40)} is no time in microseconds")
    return number
