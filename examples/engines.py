"""The same rollout on three engines: prompts in, response tokens out."""

from __future__ import annotations

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

Tokens = list[list[int]]


def rollout_transformers(cfg: DictConfig, prompts: Tokens) -> Tokens:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(cfg.seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = LlamaForCausalLM(LlamaConfig(**OmegaConf.to_container(cfg.model))).eval().to(device)
    ids = torch.tensor(prompts, device=device)
    out = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=cfg.response_tokens,
        min_new_tokens=cfg.response_tokens,
        do_sample=False,
        pad_token_id=0,
    )
    responses: Tokens = out[:, ids.shape[1] :].tolist()
    return responses


def rollout_vllm(cfg: DictConfig, prompts: Tokens) -> Tokens:
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model_folder(cfg),
        load_format="dummy",
        skip_tokenizer_init=True,
        enforce_eager=True,
        max_model_len=1024,
        dtype="float32",
        seed=cfg.seed,
    )
    sampling = SamplingParams(max_tokens=cfg.response_tokens, ignore_eos=True, detokenize=False, temperature=0)
    outputs = llm.generate([{"prompt_token_ids": ids} for ids in prompts], sampling, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def rollout_sglang(cfg: DictConfig, prompts: Tokens) -> Tokens:
    import torch

    options: dict[str, Any] = {}
    if not torch.cuda.is_available():
        os.environ.setdefault("SGLANG_USE_CPU_ENGINE", "1")
        options = {
            "device": "cpu",
            "attention_backend": "torch_native",
            "sampling_backend": "pytorch",
            "disable_cuda_graph": True,
            "max_total_tokens": 4096,
        }
    from sglang.srt.entrypoints.engine import Engine  # reads the environment

    engine = Engine(
        model_path=model_folder(cfg),
        load_format="dummy",
        skip_tokenizer_init=True,
        grammar_backend="none",
        dtype="float32",
        context_length=1024,
        max_running_requests=cfg.prompts,
        random_seed=cfg.seed,
        **options,
    )
    sampling = {"max_new_tokens": cfg.response_tokens, "temperature": 0, "ignore_eos": True}
    try:
        outputs = engine.generate(input_ids=prompts, sampling_params=sampling)
    finally:
        engine.shutdown()
    return [list(output["output_ids"]) for output in outputs]


def model_folder(cfg: DictConfig) -> str:
    """A checkpoint folder that holds a configuration only: engines fill in random weights (`load_format="dummy"`)."""
    folder = Path(tempfile.mkdtemp(prefix="tiny-llama-"))
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "head_dim": 32,
        "torch_dtype": "float32",
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        **OmegaConf.to_container(cfg.model),  # type: ignore[dict-item]
    }
    (folder / "config.json").write_text(json.dumps(config))
    return str(folder)


ROLLOUTS = {"transformers": rollout_transformers, "vllm": rollout_vllm, "sglang": rollout_sglang}
