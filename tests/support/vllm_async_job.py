"""A job that rolls out with AsyncLLM, as servers and RL frameworks do: engine and workers in processes of their own.

    python vllm_async_job.py MODELS_FOLDER TENSOR_PARALLEL_SIZE [call ...]

The calls are made in order: `start`, `stop`, and `generate`. It imports nothing of the package.
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

PROMPTS = 4
RESPONSE = 32

LAST_ITERATIONS = 5
"""More than the empty iterations in which the engine learns that its last requests have ended. It answers a call
between two iterations, so that after as many calls as many iterations have run."""


def run_script(
    folder: Path, calls: Sequence[str], environment: Mapping[str, str], tensor_parallel: int = 1
) -> subprocess.CompletedProcess[str]:
    """Run this script in a process of its own, which has to succeed."""
    done = subprocess.run(
        [sys.executable, __file__, str(folder), str(tensor_parallel), *calls],
        env={
            **os.environ,
            "HF_HUB_OFFLINE": "1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "|".join(str(cpu) for cpu in range(tensor_parallel)),
            **environment,
        },
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return done


async def generate(llm: Any, round_number: int) -> list[int]:
    from vllm import SamplingParams
    from vllm.sampling_params import RequestOutputKind

    async def one(number: int) -> int:
        params = SamplingParams(
            max_tokens=RESPONSE,
            ignore_eos=True,
            detokenize=False,
            temperature=0,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        prompt = {"prompt_token_ids": [5 + number, 6, 7, 8]}
        async for output in llm.generate(prompt, params, f"round{round_number}-{number}"):
            length = len(output.outputs[0].token_ids)
        return length

    return list(await asyncio.gather(*(one(number) for number in range(PROMPTS))))


async def job(models: Path, ranks: int, calls: list[str]) -> list[int]:
    from tiny import tiny_model
    from vllm import AsyncEngineArgs
    from vllm.v1.engine.async_llm import AsyncLLM

    args = AsyncEngineArgs(
        model=tiny_model(models / "tiny"),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        dtype="float32",
        max_model_len=256,
        kv_cache_memory_bytes=32 << 20,
        tensor_parallel_size=ranks,
        disable_log_stats=True,
    )
    llm = AsyncLLM.from_engine_args(args)
    lengths = []
    for number, call in enumerate(calls):
        if call == "generate":
            lengths += await generate(llm, number)
        elif call == "start":
            await llm.start_profile()
        elif call == "stop":
            await llm.stop_profile()
    for _ in range(LAST_ITERATIONS):
        await llm.is_sleeping()
    llm.shutdown()
    return lengths


if __name__ == "__main__":
    print(json.dumps(asyncio.run(job(Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3:]))))
