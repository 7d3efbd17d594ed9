"""The generic options of the config group `profiler`, one dataclass each.

The comment above a field is its documentation: the reference in docs/ is made from these lines.

`iterations` comes before what a user sets: OmegaConf resolves fields in their order, and the resolver of this
one checks them all, so that a wrong one is refused in one line and not by a traceback of OmegaConf's.

OmegaConf checks the types when the config is composed, in its own words. Rules beyond a type (a range, an order, fields
that exclude each other) are in `core/settings.py` and `core/window.py`.

Unpickling a config in another process imports this module, which registers the resolvers of its fields.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

from omegaconf import II

from verl_profiler_conf.schema import resolvers as _resolvers  # noqa: F401 - its import registers the resolver
from verl_profiler_conf.schema.nodes import KINDS
from verl_profiler_conf.schema.register import ITERATIONS


@dataclass
class EngineFacts:
    """Facts that the engines' own counters depend on. Null means unknown: the simplest case is assumed and reported."""

    # Engine that `version` belongs to: auto (the installed one), vllm, sglang, tensorrt_llm, transformers.
    name: str = "auto"
    # Version of that engine, for example 0.32.0; auto: the installed one. A text: the number 0.30 would lose its zero.
    version: Any = "auto"
    # Length of the longest prompt, in tokens.
    prompt_tokens: int | None = None
    # Tokens that the engine takes into one forward (vLLM max_num_batched_tokens, SGLang chunked_prefill_size).
    max_num_batched_tokens: int | None = None
    # Draft tokens per forward of speculative decoding; 0: none.
    num_speculative_tokens: int | None = None


@dataclass
class VllmCounters:
    """Values for vLLM's ProfilerConfig."""

    # Iterations between the start of vLLM's profiler and the first one that it records.
    delay_iterations: int | None = II(f"{ITERATIONS}:vllm,delay_iterations")
    # Iterations that vLLM's profiler records; 0: no limit.
    max_iterations: int | None = II(f"{ITERATIONS}:vllm,max_iterations")


@dataclass
class SglangCounters:
    """Values for the arguments of SGLang's start_profile."""

    # Forward at which recording starts, counted from the start of the scheduler.
    start_step: int | None = II(f"{ITERATIONS}:sglang,start_step")
    # Forwards that SGLang's profiler records; null: no limit.
    num_steps: int | None = II(f"{ITERATIONS}:sglang,num_steps")


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

    def __init_subclass__(cls) -> None:
        if "profiler_option" in cls.__dict__:
            KINDS[cls.profiler_option] = cls

    profiler_option: ClassVar[str]

    # Name of the option; read-only, select another one with profiler=NAME.
    option: str = ""
    # The window in the engines' own counters; computed.
    iterations: EngineCounters = field(default_factory=EngineCounters)
    # false: the settings are checked and nothing is profiled.
    enable: bool = True
    # Device to record: auto (the device that the engine's process finds), cuda, npu, cpu.
    device: str = "auto"
    # First response token of the window, counted from 0, inclusive; null: 0.
    profile_token_start: int | None = None
    # Response token to stop at, exclusive; null: to the end of the response.
    profile_token_end: int | None = None
    # Several windows instead of start and end: a list of [start, end] pairs such as [[20,80],[4096,4112]].
    profile_token_windows: list[list[int | None]] = field(default_factory=list)
    # Whose tokens count: lead (the first scheduled request), any (any running request), all (every decoding request).
    track: str = "lead"
    # Maximum number of captured iterations of a window; null: no limit.
    max_iterations: int | None = None
    # Maximum number of captures of each window, each time the window is armed; null: no limit.
    max_captures: int | None = 1
    # How many times the window goes by uncaptured first, each time the window is armed: 1 leaves out a cold rollout, or
    # a sanity check.
    skip_captures: int = 0
    # Maximum number of iterations of one trace; a longer window is written as consecutive parts, a trace each.
    part_iterations: int = 256
    # When the window is armed: job (when the engine starts), request (by the engine's start_profile call).
    arm: str = "job"
    # How the window is found: tokens (counted for each request), iterations (by the engine's own counters only).
    mapping: str = "tokens"
    # What a trace records: cpu, cuda, npu, memory, shapes, stack, module; empty: CPU and device activity. Must be empty
    # for torch_memory and nsys_window.
    contents: list[str] = field(default_factory=list)
    # Ranks of the engine, or of torch.distributed, that capture.
    ranks: list[int] = field(default_factory=lambda: [0])
    # true: every rank captures.
    all_ranks: bool = False
    # Folder for traces and manifests, or a URL such as s3://bucket/traces (extra `remote`); null: profile/ in Hydra's
    # run directory.
    save_path: str | None = None
    # Captures on other nodes of a Ray cluster: auto (bring them to the driver's folder, if they are not there), never.
    gather: str = "auto"
    # Bytes of traces that gather brings at most, as in 1GiB or 500MiB; beyond it manifests only.
    gather_limit: str = "1GiB"
    # What the job writes beside its traces when it ends: html (a page with plots; extra `report`), null (nothing).
    report: str | None = None
    # What happens when profiling fails: warn (the job goes on), raise. A wrong setting always stops the job before it
    # starts.
    on_error: str = "warn"
    # Facts about the engine that its own counters depend on.
    engine: EngineFacts = field(default_factory=EngineFacts)


@dataclass
class TorchWindow(Window):
    """A trace of torch.profiler, or of torch_npu's profiler on Ascend."""

    profiler_option: ClassVar[str] = "torch_window"

    option: str = "torch_window"


@dataclass
class NpuWindow(TorchWindow):
    """A trace of torch_npu's profiler, with the options that only it has."""

    profiler_option: ClassVar[str] = "npu_window"

    option: str = "npu_window"
    # Depth of Ascend's profiler: level_none, level0, level1, level2.
    level: str = "level0"
    # true: analyse the recording when it is written, which is slow; false: keep the raw data for a later analysis.
    analysis: bool = False


@dataclass
class TorchMemory(Window):
    """A snapshot of the CUDA allocator's history in the window."""

    profiler_option: ClassVar[str] = "torch_memory"

    option: str = "torch_memory"


@dataclass
class NsysWindow(Window):
    """Only calls cudaProfilerStart and Stop around the window, for `nsys profile --capture-range=cudaProfilerApi`."""

    profiler_option: ClassVar[str] = "nsys_window"

    option: str = "nsys_window"
