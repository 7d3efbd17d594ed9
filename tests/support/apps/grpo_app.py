"""TRL's GRPOTrainer, which makes its rollouts with transformers."""

from __future__ import annotations

from typing import Any

import hydra
import torch
from omegaconf import DictConfig
from trained import leave_result, llama, metrics, tokenizer


def reward(completions: list[str], **_: Any) -> list[float]:
    return [float(sum(map(ord, text)) % 7) for text in completions]


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
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    torch.manual_seed(cfg.train.seed)
    model = llama(cfg.response_tokens)
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
        ),
        train_dataset=Dataset.from_dict({"prompt": [f"w{i} w{i + 1}" for i in range(8)]}),
        processing_class=tokenizer(),
    )
    responses, logged = watch_rollouts(trainer)
    trainer.train()
    leave_result(model, metrics=metrics(trainer.state.log_history), responses=responses, log_probabilities=logged)


if __name__ == "__main__":
    main()
