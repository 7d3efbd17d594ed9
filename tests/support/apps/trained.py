"""What the apps of real trainers share: a model and a tokenizer made up on the spot, and a word on how it all ended."""

from __future__ import annotations

import hashlib
import json
import os
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
import transformers

WORDS = [f"w{number}" for number in range(60)]
SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def tokenizer() -> Any:
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel
    from tokenizers.pre_tokenizers import WhitespaceSplit

    names = {word: number for number, word in enumerate([*SPECIAL.values(), *WORDS])}
    words = Tokenizer(WordLevel(names, unk_token=SPECIAL["unk_token"]))
    words.pre_tokenizer = WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(tokenizer_object=words, **SPECIAL)


def llama(response_tokens: int, **changes: Any) -> Any:
    """A Llama whose every response has as many tokens."""
    torch.manual_seed(0)
    shape = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    config = transformers.LlamaConfig(**{**shape, **changes})
    return of_length(transformers.LlamaForCausalLM(config), response_tokens)


def of_length(model: Any, response_tokens: int) -> Any:
    model.generation_config.max_new_tokens = model.generation_config.min_new_tokens = response_tokens
    return mark_rollouts(model)


def mark_vllm_rollouts(llm: Any) -> None:
    """`mark_rollouts` of a vLLM in this process."""
    mark_rollouts(llm, llm.llm_engine.model_executor.driver_worker.model_runner.model)


def mark_rollouts(model: Any, forward: Any = None) -> Any:
    """Put `rollout#<n>` around each forward of the n-th `generate`, so that a trace tells by itself what it holds.

    Args:
        forward: the module whose forwards they are, where it is not the model that generates.
    """
    plain, calls, open_marks = model.generate, [0], []
    forward = model if forward is None else forward

    def generate(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        calls.append(calls[0])
        try:
            return plain(*args, **kwargs)
        finally:
            calls.pop()

    def before(*_: Any) -> None:
        mark = ExitStack()
        if len(calls) > 1:
            mark.enter_context(torch.profiler.record_function(f"rollout#{calls[-1]}"))
        open_marks.append(mark)

    model.generate = generate
    forward.register_forward_pre_hook(before)
    forward.register_forward_hook(lambda *_: open_marks.pop().close())
    return model


def metrics(entries: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a trainer has logged, but for what it says of time."""
    timed = ("runtime", "per_second", "time", "flos")
    return [{key: value for key, value in entry.items() if not any(word in key for word in timed)} for entry in entries]


def leave_result(model: Any, **more: Any) -> None:
    """`result.json` in the working directory: what training made of the model, to the last bit."""
    digest = hashlib.sha256()
    for name, weight in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(weight.detach().cpu().numpy().tobytes())
    Path("result.json").write_text(json.dumps({"weights": digest.hexdigest(), **more}, indent=1))
