"""transformers' continuous batching (`generate_batch`) on a small model."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from verl_profiler_conf.engines.transformers import continuous

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


def batching_api() -> Any:
    """transformers' module. Skips the tests of the calling file where its parts are not those that are hooked."""
    api = pytest.importorskip(continuous.MODULE, reason="an older transformers")
    if not hasattr(getattr(api, "ContinuousBatchProcessor", None), "prepare_next_batch"):
        pytest.skip("an older transformers", allow_module_level=True)
    return api


def generate_batch(model: Any, prompts: list[list[int]] = PROMPTS, tokens: int = 20, **config: Any) -> Any:
    """The responses to some prompts, by name."""
    options = transformers.generation.configuration_utils.ContinuousBatchingConfig(
        **{"num_blocks": 16, "max_batch_tokens": 64, **config}
    )
    outputs = model.generate_batch(
        prompts,
        generation_config=transformers.GenerationConfig(
            max_new_tokens=tokens, do_sample=False, eos_token_id=-1, pad_token_id=0
        ),
        continuous_batching_config=options,
        warmup=False,
    )
    assert all(output.error is None for output in outputs.values())
    return {name: output.generated_tokens for name, output in outputs.items()}
