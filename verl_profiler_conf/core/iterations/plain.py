"""The arithmetic that verl ships, for comparison: what a window becomes when tokens are taken for iterations."""

from __future__ import annotations

from verl_profiler_conf.core.iterations import sglang, trtllm, vllm
from verl_profiler_conf.core.iterations.result import Counters
from verl_profiler_conf.core.window import TokenWindow


def plain_counters(window: TokenWindow, engine: str) -> Counters:
    """Counters as verl 0.9.1 sets them (verl/utils/profiler/config.py:505-560).

    vLLM: `delay = start`, `max = end - start`; SGLang: `start_step = start`, where 0 counts as absent, and
    `num_steps = end - start`. It sets nothing for TensorRT-LLM.
    """
    if engine == "vllm":
        return {vllm.DELAY: window.start, vllm.MAX: window.length or 0}
    if engine == "sglang":
        return {sglang.START: window.start or None, sglang.NUM: window.length}
    return {trtllm.START: None, trtllm.STOP: None}
