"""What the benchmarks of vLLM share: the interpreter that has it, the environment it runs in, and a small engine."""

from __future__ import annotations

import importlib.util
import os
import sys
from pathlib import Path
from typing import Any

CLONE = Path(__file__).resolve().parent.parent
PYTHON = CLONE / ".venvs" / "vllm" / "bin" / "python"
SUPPORT = CLONE / "tests" / "support"

if str(SUPPORT) not in sys.path:
    sys.path.insert(0, str(SUPPORT))


def run_where_vllm_is() -> None:
    """Start the script again with the interpreter that has vLLM, unless this is one."""
    if importlib.util.find_spec("vllm") is None:
        os.execv(PYTHON, [str(PYTHON), *sys.argv])  # noqa: S606 - the environment that has the engine


def use_environment(**more: str) -> None:
    """Set what vLLM reads when it is imported: nothing is downloaded, reported or logged. The engine runs in this
    process, unless `more` says otherwise."""
    from vllm_driver import ENVIRONMENT

    os.environ.update({**ENVIRONMENT, "VLLM_LOGGING_LEVEL": "ERROR", **more})


def engine_arguments(folder: Path, *, layers: int = 2, max_tokens: int = 256, **more: Any) -> dict[str, Any]:
    """Arguments of `vllm.LLM` or `AsyncEngineArgs`, for a made-up model of some layers.

    Args:
        folder: for the model.
        layers: of the model.
        max_tokens: of a sequence.
        more: further arguments.
    """
    from tiny import tiny_model

    return {
        "model": tiny_model(folder / "tiny", num_hidden_layers=layers),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "enforce_eager": True,
        "dtype": "float32",
        "max_model_len": max_tokens,
        "kv_cache_memory_bytes": 64 << 20,
        **more,
    }


def sampling(tokens: int, **more: Any) -> Any:
    """`SamplingParams` of a response of exactly so many tokens, the most likely ones."""
    from vllm import SamplingParams

    return SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, temperature=0, **more)
