"""The model that all engines run, made up on the spot, and the prompts that they are given."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

from workloads import Workload

TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "vocab_size": 512,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-5,
    "torch_dtype": "float32",
    "bos_token_id": 1,
    "eos_token_id": 2,
    "tie_word_embeddings": False,
}


SMALL_LLAMA = {
    "vocab_size": 128,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
"""Arguments of `transformers.LlamaConfig` for a model that runs in the process of a test."""


def endless_llama(**changes: Any) -> Any:
    """A Llama with the same weights each time, and without a token that ends a response.

    Args:
        changes: to the arguments of `transformers.LlamaConfig`.
    """
    import torch
    import transformers

    torch.manual_seed(0)
    shape = {
        "vocab_size": 97,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "eos_token_id": None,
        "pad_token_id": 0,
    }
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**shape, **changes})).eval()


def tiny_model(folder: Path, **changes: Any) -> str:
    """A checkpoint folder with a configuration only; weights are made up by `load_format="dummy"`."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps({**TINY, **changes}))
    return str(folder)


def prompts(workload: Workload, seed: int = 7) -> list[list[int]]:
    draw = random.Random(seed)
    prefix = [draw.randrange(3, 512) for _ in range(workload.shared_prefix)]
    found = []
    for length in workload.prompts:
        own = [draw.randrange(3, 512) for _ in range(length - len(prefix))]
        if workload.repetitive:
            own = (own[:4] * length)[: length - len(prefix)]
        found.append(prefix + own)
    return found
