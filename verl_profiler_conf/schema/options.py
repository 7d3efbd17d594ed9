"""The generic options of the config group `profiler`, a dataclass each.

The comment above a field is its documentation: the reference in docs/ is made from these lines.

Fields are typed `Any` where a value has rules. OmegaConf would turn `"12"` into 12 before anyone could refuse it, and
tell of a wrong type in four lines; `settings.py` says it in one, with the full key. Only the shape is fixed here.

A config that was pickled and is loaded elsewhere imports this module, and so finds the resolvers of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from verl_profiler_conf.schema.resolvers import ITERATIONS


@dataclass
class EngineFacts:
    """What the engines' own counters depend on. Null where unknown: the plain case is assumed, and said."""

    # Engine whose version is given: auto, vllm, sglang. auto: whatever is installed.
    name: Any = "auto"
    # Its version, as in 0.32.0. auto: the installed one.
    version: Any = "auto"
    # Length of the longest prompt, in tokens.
    prompt_tokens: Any = None
    # Tokens that the engine takes into one forward (vLLM max_num_batched_tokens, SGLang chunked_prefill_size).
    max_num_batched_tokens: Any = None
    # Draft tokens per forward of speculative decoding; 0 without.
    num_speculative_tokens: Any = None


@dataclass
class VllmCounters:
    """For vLLM's ProfilerConfig."""

    # Iterations from the start of the profiler to its first recorded one, as vLLM counts them.
    delay_iterations: Any = f"${{{ITERATIONS}:vllm,delay_iterations}}"
    # Iterations that it records; 0: no limit.
    max_iterations: Any = f"${{{ITERATIONS}:vllm,max_iterations}}"


@dataclass
class SglangCounters:
    """For the arguments of SGLang's start_profile."""

    # Forward at which recording starts, counted from the start of the scheduler.
    start_step: Any = f"${{{ITERATIONS}:sglang,start_step}}"
    # Forwards that it records; null: no limit.
    num_steps: Any = f"${{{ITERATIONS}:sglang,num_steps}}"


@dataclass
class EngineCounters:
    """The window in the engines' own counters. Computed; not to be set."""

    # For vLLM.
    vllm: VllmCounters = field(default_factory=VllmCounters)
    # For SGLang.
    sglang: SglangCounters = field(default_factory=SglangCounters)


@dataclass
class Window:
    """What every option has. An option is known by its `profiler_option`, wherever its node stands in a config."""

    profiler_option: ClassVar[str]

    # false: the settings are still checked, but nothing runs.
    enable: Any = True
    # Accelerator to record: auto (what the engine's process finds), cuda, npu, cpu.
    device: Any = "auto"
    # First response token of the window, 0-based, inclusive; null: 0.
    profile_token_start: Any = None
    # Response token to stop at, exclusive; null: to the end of the response.
    profile_token_end: Any = None
    # Several windows, a list of [start, end] pairs such as [[20,80],[4096,4112]]; instead of start and end.
    profile_token_windows: Any = field(default_factory=list)
    # Whose tokens count: lead (one request, the first scheduled), any (any running request), all (every decoding one).
    track: Any = "lead"
    # Most iterations that a window captures; null: no limit.
    max_iterations: Any = None
    # Captures of each window per arming; null: no limit.
    max_captures: Any = 1
    # Most iterations of one trace; a longer window is written as consecutive parts, a trace each, without a gap.
    part_iterations: Any = 256
    # When to wait for the window: job (from the engine's start), request (from the engine's start_profile call on).
    arm: Any = "job"
    # How to find the window: tokens (counted per request), iterations (the engine's own counters only).
    mapping: Any = "tokens"
    # What a trace records: cpu, cuda, npu, memory, shapes, stack, module; empty: CPU and device activity. Only empty
    # for torch_memory and nsys_window, which have no choice.
    contents: Any = field(default_factory=list)
    # Ranks that capture, of the engine or of torch.distributed.
    ranks: Any = field(default_factory=lambda: [0])
    # true: every rank captures.
    all_ranks: Any = False
    # Folder for traces and manifests; null: profile/ in Hydra's run directory.
    save_path: Any = None
    # What a failing profiler does to the job: warn, raise. A wrong setting always stops it, before it starts.
    on_error: Any = "warn"
    # Facts about the engine, for its own counters.
    engine: EngineFacts = field(default_factory=EngineFacts)
    # The window in the engines' own counters; computed from the above.
    iterations: EngineCounters = field(default_factory=EngineCounters)


@dataclass
class TorchWindow(Window):
    """A trace of torch.profiler (of torch_npu's on Ascend)."""

    profiler_option: ClassVar[str] = "torch_window"


@dataclass
class NpuWindow(TorchWindow):
    """A trace of torch_npu's profiler, with its own options."""

    profiler_option: ClassVar[str] = "npu_window"

    # Depth of Ascend's profiler: level_none, level0, level1, level2.
    level: Any = "level0"
    # true: analyse the recording when it is written, which takes long; false: raw data, for a later analysis.
    analysis: Any = False


@dataclass
class TorchMemory(Window):
    """A snapshot of the CUDA allocator's history in the window."""

    profiler_option: ClassVar[str] = "torch_memory"


@dataclass
class NsysWindow(Window):
    """cudaProfilerStart and Stop around the window, for `nsys profile --capture-range=cudaProfilerApi`."""

    profiler_option: ClassVar[str] = "nsys_window"
