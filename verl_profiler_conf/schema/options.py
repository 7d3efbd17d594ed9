"""The generic options of the config group `profiler`, one dataclass each.

The comment above a field is its documentation: the reference in docs/ is made from these lines.

Fields are typed `Any` where a value has rules. OmegaConf would turn `"12"` into 12 before anyone could refuse it, and
report a wrong type in four lines; `settings.py` reports it in one, with the full key.

Unpickling a config in another process imports this module, which registers the resolvers of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_profiler_conf.schema import resolvers as _resolvers  # noqa: F401 - its import registers the resolver
from verl_profiler_conf.schema.register import ITERATIONS


@dataclass
class EngineFacts:
    """Facts that the engines' own counters depend on. Null means unknown: the simplest case is assumed and reported."""

    # Engine that `version` belongs to: auto (the installed one), vllm, sglang.
    name: Any = "auto"
    # Version of that engine, for example 0.32.0; auto: the installed one.
    version: Any = "auto"
    # Length of the longest prompt, in tokens.
    prompt_tokens: Any = None
    # Tokens that the engine takes into one forward (vLLM max_num_batched_tokens, SGLang chunked_prefill_size).
    max_num_batched_tokens: Any = None
    # Draft tokens per forward of speculative decoding; 0: none.
    num_speculative_tokens: Any = None


@dataclass
class VllmCounters:
    """Values for vLLM's ProfilerConfig."""

    # Iterations between the start of vLLM's profiler and the first one that it records.
    delay_iterations: Any = f"${{{ITERATIONS}:vllm,delay_iterations}}"
    # Iterations that vLLM's profiler records; 0: no limit.
    max_iterations: Any = f"${{{ITERATIONS}:vllm,max_iterations}}"


@dataclass
class SglangCounters:
    """Values for the arguments of SGLang's start_profile."""

    # Forward at which recording starts, counted from the start of the scheduler.
    start_step: Any = f"${{{ITERATIONS}:sglang,start_step}}"
    # Forwards that SGLang's profiler records; null: no limit.
    num_steps: Any = f"${{{ITERATIONS}:sglang,num_steps}}"


@dataclass
class EngineCounters:
    """The window in the engines' own counters. These fields are computed and cannot be set."""

    # Counters of vLLM.
    vllm: VllmCounters = field(default_factory=VllmCounters)
    # Counters of SGLang.
    sglang: SglangCounters = field(default_factory=SglangCounters)


@dataclass
class Window:
    """The fields of every option. `profiler_option` names the option, wherever its node is in a config."""

    profiler_option: ClassVar[str]

    # false: the settings are checked and nothing is profiled.
    enable: Any = True
    # Device to record: auto (the device that the engine's process finds), cuda, npu, cpu.
    device: Any = "auto"
    # First response token of the window, counted from 0, inclusive; null: 0.
    profile_token_start: Any = None
    # Response token to stop at, exclusive; null: to the end of the response.
    profile_token_end: Any = None
    # Several windows instead of start and end: a list of [start, end] pairs such as [[20,80],[4096,4112]].
    profile_token_windows: Any = field(default_factory=list)
    # Whose tokens count: lead (the first scheduled request), any (any running request), all (every decoding request).
    track: Any = "lead"
    # Maximum number of captured iterations of a window; null: no limit.
    max_iterations: Any = None
    # Maximum number of captures of each window, each time the window is armed; null: no limit.
    max_captures: Any = 1
    # When the window is armed: job (when the engine starts), request (by the engine's start_profile call).
    arm: Any = "job"
    # How the window is found: tokens (counted for each request), iterations (by the engine's own counters only).
    mapping: Any = "tokens"
    # What a trace records: cpu, cuda, npu, memory, shapes, stack, module; empty: CPU and device activity. Must be empty
    # for torch_memory and nsys_window.
    contents: Any = field(default_factory=list)
    # Ranks of the engine, or of torch.distributed, that capture.
    ranks: Any = field(default_factory=lambda: [0])
    # true: every rank captures.
    all_ranks: Any = False
    # Folder for traces and manifests; null: profile/ in Hydra's run directory.
    save_path: Any = None
    # What happens when profiling fails: warn (the job goes on), raise. A wrong setting always stops the job before it
    # starts.
    on_error: Any = "warn"
    # Facts about the engine that its own counters depend on.
    engine: EngineFacts = field(default_factory=EngineFacts)
    # The window in the engines' own counters; computed.
    iterations: EngineCounters = field(default_factory=EngineCounters)


@dataclass
class TorchWindow(Window):
    """A trace of torch.profiler, or of torch_npu's profiler on Ascend."""

    profiler_option: ClassVar[str] = "torch_window"


@dataclass
class NpuWindow(TorchWindow):
    """A trace of torch_npu's profiler, with the options that only it has."""

    profiler_option: ClassVar[str] = "npu_window"

    # Depth of Ascend's profiler: level_none, level0, level1, level2.
    level: Any = "level0"
    # true: analyse the recording when it is written, which is slow; false: keep the raw data for a later analysis.
    analysis: Any = False


@dataclass
class TorchMemory(Window):
    """A snapshot of the CUDA allocator's history in the window."""

    profiler_option: ClassVar[str] = "torch_memory"


@dataclass
class NsysWindow(Window):
    """Only calls cudaProfilerStart and Stop around the window, for `nsys profile --capture-range=cudaProfilerApi`."""

    profiler_option: ClassVar[str] = "nsys_window"
