"""TRL's GRPOTrainer, which makes its rollouts with transformers, or with a vLLM in its own process (`rollout=vllm`)."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from trained import leave_result, llama, mark_vllm_rollouts, metrics, tokenizer


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


def prompts() -> Any:
    """A dataset that is told its fingerprint: datasets finds one out by dill, which takes pyarrow for code of the app
    where it does not lie in a folder `site-packages`."""
    from datasets import Dataset
    from datasets.table import InMemoryTable

    table = InMemoryTable.from_pydict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]})
    return Dataset(table, fingerprint="prompts")


def vllm_options(model: Any, words: Any) -> dict[str, Any]:
    """Of `GRPOConfig`, once the model lies in a folder, from where vLLM reads it."""
    import trl.generation.vllm_generation as rollouts
    from vllm import _custom_ops

    rollouts.LLM = functools.partial(rollouts.LLM, enforce_eager=True)  # compiling takes two minutes
    _custom_ops._supports_onednn = False  # else vLLM's CPU build packs the weights, and TRL cannot replace them
    folder = str(Path("model").absolute())
    model.save_pretrained(folder)
    words.save_pretrained(folder)
    model.name_or_path = folder
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_max_model_length": 128,
        "generation_kwargs": {"ignore_eos": True},
    }


def watch_rollouts(trainer: Any) -> tuple[list[Any], list[Any]]:
    """The tokens of each rollout, and the log probabilities that the trainer gives them."""
    responses: list[Any] = []
    logged: list[Any] = []
    plain = trainer._get_per_token_logps_and_entropies

    def watched(model: Any, ids: Any, *args: Any, **kwargs: Any) -> Any:
        result = plain(model, ids, *args, **kwargs)
        responses.append(ids.tolist())
        logged.append(result[0].tolist())
        return result

    trainer._get_per_token_logps_and_entropies = watched
    return responses, logged


@hydra.main(config_path="conf", config_name="grpo", version_base="1.3")
def main(cfg: DictConfig) -> None:
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(cfg.train.seed)
    model, words = llama(cfg.response_tokens, **cfg.model), tokenizer()
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=GRPOConfig(
            output_dir="out",
            max_steps=cfg.train.max_steps,
            learning_rate=cfg.train.learning_rate,
            seed=cfg.train.seed,
            per_device_train_batch_size=4,
            num_generations=4,
            max_completion_length=cfg.response_tokens,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            bf16=False,
            disable_tqdm=True,
            **(vllm_options(model, words) if cfg.rollout == "vllm" else {}),
        ),
        train_dataset=prompts(),
        processing_class=words,
    )
    responses, logged = watch_rollouts(trainer)
    if cfg.rollout == "vllm":
        mark_vllm_rollouts(trainer.vllm_generation.llm)
    trainer.train()
    leave_result(model, metrics=metrics(trainer.state.log_history), responses=responses, log_probabilities=logged)


if __name__ == "__main__":
    main()
