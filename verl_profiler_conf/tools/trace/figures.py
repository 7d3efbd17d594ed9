"""The figures of an analysis. Times are microseconds. dataclasses.asdict turns every class into plain data."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from verl_profiler_conf.tools.trace.iterations import Phase, Source
from verl_profiler_conf.tools.trace.names import Kind

Attribution = Literal["launch", "time"]


@dataclass(frozen=True, slots=True)
class Spread:
    """How values are spread.

    Attributes:
        count: how many.
        median: of all; so are the others.
        p10: a tenth is smaller.
        p90: a tenth is larger.
    """

    count: int
    median: float
    p10: float
    p90: float
    smallest: float
    largest: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread | None:
        """None for no values."""
        ordered = sorted(values)
        if not ordered:
            return None
        last = len(ordered) - 1
        return cls(
            len(ordered),
            statistics.median(ordered),
            ordered[round(last * 0.1)],
            ordered[round(last * 0.9)],
            ordered[0],
            ordered[last],
        )


@dataclass(frozen=True, slots=True)
class DeviceTime:
    """A span of device time, as long as `busy_us + idle_us`. The spans of all iterations add up to the whole.

    Attributes:
        kernels: kernels that ran in it.
        copies: copies and fills.
        work_us: time of all kernels and copies, one by one: more than `busy_us` where streams overlap.
        busy_us: time in which at least one ran.
        compute_us: time in which a computing kernel ran.
        communication_us: time in which a communicating kernel ran.
        exposed_us: of `communication_us`, time in which no computing kernel ran: communication that is not hidden.
        copy_us: time in which a copy or fill ran.
        idle_us: time in which nothing ran, before each of the kernels and copies.
        launch_wait_us: of `idle_us`, time before kernels that started as soon as they were launched: the device waited
            for the host.
        gaps: how many times the device was idle.
        longest_gap_us: the longest.
        queued_us: mean time from the end of a launch call to the begin of what it launched; None where no launch was
            found.
        first_us: when the first kernel or copy began, after the trace's `origin_us`; None without any.
        last_us: when the last one ended.
    """

    kernels: int
    copies: int
    work_us: float
    busy_us: float
    compute_us: float
    communication_us: float
    exposed_us: float
    copy_us: float
    idle_us: float
    launch_wait_us: float
    gaps: int
    longest_gap_us: float
    queued_us: float | None
    first_us: float | None
    last_us: float | None

    @property
    def busy_share(self) -> float:
        """0 to 1; 0 without any device work."""
        return self.busy_us / (self.busy_us + self.idle_us) if self.busy_us else 0.0

    @property
    def launch_bound(self) -> bool:
        """The device stands idle for a fifth of the time or more, and mostly because nothing had been launched yet."""
        return self.idle_us >= 0.2 * (self.busy_us + self.idle_us) and self.launch_wait_us >= 0.5 * self.idle_us > 0

    @property
    def hidden_share(self) -> float | None:
        """Share of the communication that runs under computation, 0 to 1; None without communication."""
        return 1 - self.exposed_us / self.communication_us if self.communication_us else None


@dataclass(frozen=True, slots=True)
class Iteration:
    """One iteration of the engine.

    Attributes:
        position: 0-based, in the order of the trace.
        number: as the range names it; `position` where it names none.
        lo: first response token that the tracked request made; None where the range does not say.
        hi: one past the last.
        requests: size of the batch, where known.
        prefills: requests that ran their prompt, where known.
        decodes: requests that made tokens, where known.
        phase: prefill, decode or mixed, where known.
        begin_us: on the host, after the trace's `origin_us`.
        wall_us: how long the host's range took.
        period_us: from its begin to the begin of the next; None for the last, and before a hole in the numbers.
        device: what its launches ran on the device, whenever that was; None in a trace without device work.
    """

    position: int
    number: int
    lo: int | None
    hi: int | None
    requests: int | None
    prefills: int | None
    decodes: int | None
    phase: Phase | None
    begin_us: float
    wall_us: float
    period_us: float | None
    device: DeviceTime | None


@dataclass(frozen=True, slots=True)
class KernelTime:
    """One kernel, or kind of copy, by name. Times of single calls are `smallest_us` to `largest_us`."""

    name: str
    kind: Kind
    calls: int
    total_us: float
    smallest_us: float
    largest_us: float
    share: float


@dataclass(frozen=True, slots=True)
class OperatorTime:
    """One operator or annotation of the host, by name.

    Attributes:
        is_annotation: a range that a program named, not an operator.
        calls: how often it ran.
        total_us: on the host, with all inside it.
        self_us: without the operators inside it.
        device_us: time of the kernels that it launched itself.
    """

    name: str
    is_annotation: bool
    calls: int
    total_us: float
    self_us: float
    device_us: float


@dataclass(frozen=True, slots=True)
class RuntimeTime:
    """Calls of the device's runtime on the host (launches, synchronisations, copies), by name."""

    name: str
    calls: int
    total_us: float


@dataclass(frozen=True, slots=True)
class WorkPiece:
    """One piece of device work in a strip: begin after the trace's `origin_us`."""

    name: str
    kind: Kind
    device: str
    stream: str
    begin_us: float
    dur_us: float


@dataclass(frozen=True)
class Analysis:
    """All figures of one trace.

    Attributes:
        path: the file.
        events: how many it holds.
        operators_count: operators among them.
        kernels_count: kernels among them.
        copies_count: copies and fills among them.
        origin_us: zero of the times here, on the trace's clock.
        base_ns: what the trace's clock counts from (`baseTimeNanoseconds`), 0 where the file does not say.
        span_us: from the first event to the end of the last.
        rank: of torch.distributed, where the trace says it.
        world_size: of torch.distributed, where the trace says it.
        backend: of torch.distributed, such as `nccl`, where the trace says it.
        devices: names of the devices that the trace lists.
        source: which ranges the iterations are; None where there are none.
        attribution: how device work found its iteration: by the call that launched it, or, in a trace without such
            calls, by when it began; None without device work or iterations.
        iterations: in order.
        device: the whole trace; None without device work.
        outside: device work of no iteration; None without iterations or without device work.
        kernels: the longest in sum first.
        kernel_names: how many names there are, also beyond `kernels`.
        operators: the longest own time first.
        runtime: the longest in sum first.
        operators_ordered: false: own times of operators are not exact, for the file has them in no order.
        by_iteration: for the kernels that took longest, microseconds in each iteration.
        strip: device work of one iteration, `strip_iteration`, in the order it began.
        strip_iteration: position of the iteration; None where there is no strip.
        notes: sentences on what a reader of the figures should know.
    """

    path: str
    events: int
    operators_count: int
    kernels_count: int
    copies_count: int
    origin_us: float
    base_ns: int
    span_us: float
    rank: int | None
    world_size: int | None
    backend: str | None
    devices: tuple[str, ...]
    source: Source | None
    attribution: Attribution | None
    iterations: tuple[Iteration, ...]
    device: DeviceTime | None
    outside: DeviceTime | None
    kernels: tuple[KernelTime, ...]
    kernel_names: int
    operators: tuple[OperatorTime, ...]
    runtime: tuple[RuntimeTime, ...]
    operators_ordered: bool
    by_iteration: dict[str, tuple[float, ...]] = field(default_factory=dict)
    strip: tuple[WorkPiece, ...] = ()
    strip_iteration: int | None = None
    notes: tuple[str, ...] = ()

    def phase(self, *phases: Phase) -> list[Iteration]:
        """The iterations of these phases."""
        return [iteration for iteration in self.iterations if iteration.phase in phases]

    def wall(self, iterations: Sequence[Iteration] | None = None) -> Spread | None:
        """Spread of the iterations' time on the host; None without iterations."""
        return Spread.of(i.wall_us for i in (self.iterations if iterations is None else iterations))

    def as_data(self) -> dict[str, Any]:
        """Plain data, as JSON takes it."""
        from dataclasses import asdict

        return asdict(self)
