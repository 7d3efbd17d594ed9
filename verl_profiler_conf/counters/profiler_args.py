"""Arguments for an engine's own profiler, where the engine's process cannot load the hook.

There is a builder for each engine. It turns the window into the engine's counters (`core.iterations`), and puts them
into the form that the installed version takes. Counters that do not hold the window exactly are logged once, and `plan`
says why. Nothing imports an engine, except `manager_call` of SGLang.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from packaging.version import Version

from verl_profiler_conf.core.errors import ConfigError
from verl_profiler_conf.core.iterations import CounterPlan, plan
from verl_profiler_conf.core.iterations.sglang import counting
from verl_profiler_conf.core.iterations.vllm import DELAY, MAX, bounds_support
from verl_profiler_conf.core.settings import Settings
from verl_profiler_conf.core.window import TokenWindow
from verl_profiler_conf.counters.plan import WORKER_OF_DEVICE, capped, installed_version, known_facts, skipping

_log = logging.getLogger(__name__)

_VLLM_ACTIVITIES = {"cpu": "CPU", "cuda": "CUDA", "npu": "PrivateUse1"}
_SGLANG_ACTIVITIES = {"cpu": "CPU", "cuda": "GPU", "npu": "GPU", "memory": "MEM"}


@dataclass(frozen=True)
class VllmProfilerArgs:
    """The window for vLLM's own profiler.

    Attributes:
        engine_args: for the constructor, `LLM(..., **engine_args)`: `profiler_config` from 0.13.0, nothing before.
        env: variables to set before the engine starts: up to 0.12.0, nothing later.
        plan: the counters, how well they hold the window, and why.
    """

    engine_args: Mapping[str, Any]
    env: Mapping[str, str]
    plan: CounterPlan


@dataclass(frozen=True)
class SglangProfilerArgs:
    """The window for SGLang's own profiler.

    Attributes:
        engine_kwargs: for `Engine.start_profile(**engine_kwargs)`, which takes keywords from 0.5.3 on.
        takes_object: whether `TokenizerManager.start_profile` of that version takes one `ProfileReq`, as from 0.5.15.
        plan: the counters, how well they hold the window, and why.
    """

    engine_kwargs: Mapping[str, Any]
    takes_object: bool
    plan: CounterPlan

    def manager_call(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Arguments for the tokenizer manager: `args, kwargs = ...; await manager.start_profile(*args, **kwargs)`.

        Keywords before 0.5.15, a `ProfileReq` since (managers/tokenizer_control_mixin.py), which imports SGLang.
        """
        if not self.takes_object:
            return (), dict(self.engine_kwargs)
        from sglang.srt.managers.io_struct import ProfileReq

        return (ProfileReq(**self.engine_kwargs),), {}


def build_vllm_profiler_args(
    what: Settings | TokenWindow,
    *,
    version: str | None = None,
    worker: str | None = None,
    save_path: str | None = None,
    **facts: int | None,
) -> VllmProfilerArgs:
    """The window for vLLM's own profiler, in the form that a version takes.

    Up to 0.11.2 a directory is all it knows (envs.py: VLLM_TORCH_PROFILER_DIR), 0.12.0 adds
    VLLM_PROFILER_DELAY_ITERS and VLLM_PROFILER_MAX_ITERS, 0.13.0 moves everything to `ProfilerConfig`
    (config/profiler.py), and 0.31.0 adds the choice of activities there.

    Args:
        what: settings, or a bare window for everything at its default.
        version: vLLM's (vllm-ascend's on an NPU); None: the installed one, or the newest semantics.
        worker: `gpu`, `cpu`, `xpu`, `npu`, `tpu`; None: by the settings' device.
        save_path: absolute folder of the traces; None: the settings'.
        facts: `prompt_tokens`, `max_num_batched_tokens`, `num_speculative_tokens`, as in `iterations.plan`; they
            prevail over those in the settings.

    Raises:
        ConfigError: no folder given, or an option that vLLM's profiler cannot serve.
    """
    ask = _Ask.of(what, "vllm", version, worker, save_path, facts)
    if ask.option == "torch_memory":
        raise ConfigError(
            "profiler", ask.option, "vLLM's own profiler records no allocator history; use mapping=tokens"
        )
    counters = ask.plan()
    release = Version(counters.version)
    if release < Version("0.13.0"):
        return VllmProfilerArgs({}, ask.vllm_env(counters, release), counters)
    config: dict[str, Any] = {"profiler": "cuda" if ask.option == "nsys_window" else "torch"}
    if ask.option != "nsys_window":
        config |= {
            "torch_profiler_dir": ask.folder(),
            "torch_profiler_with_stack": ask.has("stack"),
            "torch_profiler_record_shapes": ask.has("shapes"),
            "torch_profiler_with_memory": ask.has("memory"),
        }
        activities = [name for content, name in _VLLM_ACTIVITIES.items() if ask.has(content)]
        if activities and release >= Version("0.31.0"):
            config["torch_profiler_activities"] = activities
    # the frontend's profiler is never windowed: it would record the whole rollout
    config["ignore_frontend"] = True
    config |= {name: value for name, value in counters.values.items() if value is not None}
    return VllmProfilerArgs({"profiler_config": config}, {}, counters)


def build_sglang_profiler_args(
    what: Settings | TokenWindow,
    *,
    version: str | None = None,
    save_path: str | None = None,
    forward_count: int | None = None,
    **facts: int | None,
) -> SglangProfilerArgs:
    """The window for SGLang's own profiler, in the form that a version takes.

    `start_step` came with 0.4.9.post2 and `num_steps` alone records one iteration less up to 0.5.15, so a window from
    token 0 always has `start_step=1`, which is in the past and means "from now on". `stop_profile` raises once SGLang
    has closed the window itself, so a caller that calls it anyway has to expect an error.

    Args:
        what: settings, or a bare window for everything at its default.
        version: SGLang's; None: the installed one, or the newest semantics.
        save_path: absolute folder of the traces; None: the settings'.
        forward_count: forwards that the scheduler has run so far; None: unknown, which a window from token 0 does not
            need and any other does.
        facts: as for `build_vllm_profiler_args`.

    Raises:
        ConfigError: no folder given.
    """
    ask = _Ask.of(what, "sglang", version, None, save_path, facts)
    counters = ask.plan(forward_count)
    release = Version(counters.version)
    rules = counting(release)
    kwargs: dict[str, Any] = {"output_dir": ask.folder(), "activities": ask.sglang_activities()}
    if rules.has_start:
        kwargs["start_step"] = counters.values["start_step"]
    kwargs["num_steps"] = counters.values["num_steps"]
    if release >= Version("0.4.8"):
        kwargs |= {"with_stack": ask.has("stack"), "record_shapes": ask.has("shapes")}
    return SglangProfilerArgs(kwargs, rules.takes_object, counters)


@dataclass(frozen=True)
class _Ask:
    """What the caller of a builder wants, completed with what is installed."""

    window: TokenWindow
    engine: str
    version: str | None
    worker: str | None
    option: str = "torch_window"
    contents: tuple[str, ...] = ()
    save_path: str | None = None
    facts: Mapping[str, int | None] = field(default_factory=dict)
    skip_captures: int = 0

    @classmethod
    def of(
        cls,
        what: Settings | TokenWindow,
        engine: str,
        version: str | None,
        worker: str | None,
        save_path: str | None,
        facts: Mapping[str, int | None],
    ) -> _Ask:
        if isinstance(what, TokenWindow):
            return cls(
                what, engine, version or installed_version(engine, worker), worker, save_path=save_path, facts=facts
            )
        worker = worker or WORKER_OF_DEVICE.get(what.device)
        stated, known = known_facts(what, engine)
        version = version or stated or installed_version(engine, worker)
        path = save_path or what.save_path
        if len(what.windows) > 1:
            others = ", ".join(str(window) for window in what.windows[1:])
            _log.warning("%s's counters hold one window: %s is used, not %s", engine, what.windows[0], others)
        window = capped(what.windows[0], what.max_iterations)
        return cls(
            window, engine, version, worker, what.option, what.contents, path, {**known, **facts}, what.skip_captures
        )

    def plan(self, forward_count: int | None = None) -> CounterPlan:
        result = plan(
            self.window,
            engine=self.engine,
            version=self.version,
            worker=self.worker,
            forward_count=forward_count,
            **self.facts,
        )
        result = skipping(result, self.skip_captures)
        if not result.fit.exact:
            _log.warning("tokens %s: %s", self.window, result)
        return result

    def has(self, content: str) -> bool:
        return content in self.contents

    def folder(self) -> str:
        if not self.save_path:
            raise ConfigError("save_path", self.save_path, "must name the folder that the engine writes its traces to")
        return self.save_path

    def vllm_env(self, counters: CounterPlan, release: Version) -> dict[str, str]:
        if self.option == "nsys_window":
            env = {"VLLM_TORCH_CUDA_PROFILE": "1"} if release >= Version("0.12.0") else {}
        else:
            env = {
                "VLLM_TORCH_PROFILER_DIR": self.folder(),
                "VLLM_TORCH_PROFILER_WITH_STACK": str(int(self.has("stack"))),
                "VLLM_TORCH_PROFILER_RECORD_SHAPES": str(int(self.has("shapes"))),
                "VLLM_TORCH_PROFILER_WITH_PROFILE_MEMORY": str(int(self.has("memory"))),
            }
        if bounds_support(release, self.worker) == "env":
            env |= {
                "VLLM_TORCH_PROFILER_DISABLE_ASYNC_LLM": "1",
                "VLLM_PROFILER_DELAY_ITERS": str(counters.values[DELAY]),
                "VLLM_PROFILER_MAX_ITERS": str(counters.values[MAX]),
            }
        return env

    def sglang_activities(self) -> list[str]:
        if self.option == "nsys_window":
            return ["CUDA_PROFILER"]
        if self.option == "torch_memory":
            return ["MEM"]
        named = [name for content, name in _SGLANG_ACTIVITIES.items() if self.has(content)]
        return list(dict.fromkeys(named)) or ["CPU", "GPU"]
