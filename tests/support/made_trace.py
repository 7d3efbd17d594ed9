"""Made-up Kineto traces of a GPU, in the format that Kineto writes (torch 2.13), for machines that have none."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

START_US = 5_251_711_388_039.582
"""When the recording began."""

KERNEL = "void at::native::elementwise_kernel<128, 2, at::native::{lambda(int)#1}>(int, at::native::{lambda(int)#1})"

_EVENT = """
  {{
    "ph": "X",
    "cat": "{cat}",
    "name": "{name}",
    "pid": {pid},
    "tid": {tid},
    "ts": {ts:.3f},
    "dur": {dur:.3f}
    ,
    "args": {{
      {args}
    }}
  }},"""

_FLOW = """
  {{
    "ph": "{ph}",
    "id": {id},
    "pid": {pid},
    "tid": {tid},
    "ts": {ts:.3f},
    "cat": "ac2g",
    "name": "ac2g"
    {bind}
  }},"""


@dataclass
class MadeTrace:
    """One recording, built in the order in which the work is launched.

    Host work lies on one thread. `write` gives the JSON: host events first, then calls and device events.
    """

    name: str = "/somewhere/raw.json"
    now_us: float = START_US + 100.0
    correlation: int = 100
    base_us: float = 0.0
    _host: list[str] = field(default_factory=list)
    _device: list[str] = field(default_factory=list)

    def iteration(self, index: int, *, operators: int = 2, kernels: int = 2, graphs: int = 0, copies: int = 0) -> None:
        """A range with operators, kernel launches of their own (3 us each), a graph of 5 kernels, copies (2 us)."""
        begin = self.now_us
        body = [self._operator() for _ in range(operators)]
        for _ in range(kernels):
            self.launch("cudaLaunchKernel")
        for _ in range(graphs):
            self.launch("cudaGraphLaunch", kernels=5)
        for _ in range(copies):
            self.launch("cudaMemcpyAsync", cat="gpu_memcpy", name="Memcpy HtoD (Pageable -> Device)", duration=2.0)
        self.now_us += 10
        span = f"response_tokens[{index}:{index + 1}) iter={index} reqs=8"
        self._host.append(
            _EVENT.format(
                cat="user_annotation",
                name=span,
                pid=1,
                tid=1,
                ts=begin,
                dur=self.now_us - begin,
                args=f'"External id": {self.correlation}',
            )
        )
        self._host.extend(body)
        self.now_us += 10

    def annotation(self, name: str) -> None:
        """A range of the job's own."""
        args = f'"External id": {self.correlation}'
        event = _EVENT.format(cat="user_annotation", name=name, pid=1, tid=1, ts=self.now_us, dur=1.0, args=args)
        self._host.append(event)

    def launch(
        self,
        call: str,
        *,
        kernels: int = 1,
        cat: str = "kernel",
        name: str = KERNEL,
        delay: float = 6.0,
        duration: float = 3.0,
        stream: int = 7,
    ) -> None:
        """A call of the runtime, and the device events that share its correlation id."""
        self.correlation += 1
        cid = self.correlation
        args = f'"External id": {cid}, "cbid": 211, "correlation": {cid}'
        self._device.append(
            _EVENT.format(cat="cuda_runtime", name=call, pid=1, tid=1, ts=self.now_us, dur=2.0, args=args)
        )
        self._device.append(_FLOW.format(ph="s", id=cid, pid=1, tid=1, ts=self.now_us, bind=""))
        for number in range(kernels):
            begin = self.now_us + delay + number * duration
            args = (
                f'"External id": {cid}, "queued": 0, "device": 0, "context": 1,\n      "stream": {stream}, '
                f'"correlation": {cid},\n      "grid": [2400, 1, 1],\n      "block": [128, 1, 1]'
            )
            self._device.append(_EVENT.format(cat=cat, name=name, pid=0, tid=stream, ts=begin, dur=duration, args=args))
            self._device.append(_FLOW.format(ph="f", id=cid, pid=0, tid=stream, ts=begin, bind=', "bp": "e"'))
        self.now_us += 4

    def _operator(self) -> str:
        self.now_us += 2
        args = f'"External id": {self.correlation},"Record function id": 0, "Ev Idx": 1'
        return _EVENT.format(cat="cpu_op", name="aten::add", pid=1, tid=1, ts=self.now_us, dur=1.0, args=args)

    def parts(self) -> Iterator[str]:
        """The text, in pieces."""
        yield (
            ' {\n    "schemaVersion": 1,\n    "deviceProperties": [],\n    \n      "trace_id": "5A4C",\n'
            '    "displayTimeUnit": "ms",\n    "baseTimeNanoseconds": 1790857026000000000,\n    "traceEvents": [\n    '
        )
        yield (
            '\n  {\n    "ph": "M",\n    "name": "process_name",\n'
            f'    "ts": {START_US:.3f},\n    "pid": 1,\n    "tid": 0,\n'
            '    "args": {\n      "name": "python"\n    }\n  },'
        )
        yield from self._host
        yield from self._device
        yield (
            '\n  {\n    "ph": "i",\n    \n    "s": "g",\n    "name": "Record Window End",\n    "pid": "",\n'
            f'    "tid": "",\n    "ts": {self.now_us + 100:.3f}\n    \n  }}\n  ],"traceName": "{self.name}" }}'
        )

    def text(self) -> str:
        return "".join(self.parts())
