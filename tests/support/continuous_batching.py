"""transformers' continuous batching (`generate_batch`) on a small model."""

from __future__ import annotations

from typing import Any

import torch
import transformers

PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


def small_model() -> Any:
    """With the same weights each time, and without a token that ends a response."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=97,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(config).eval()


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
