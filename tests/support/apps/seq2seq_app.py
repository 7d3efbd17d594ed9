"""transformers' Seq2SeqTrainer: a T5, evaluated by generating; once before training, to see that it works."""

from __future__ import annotations

import hydra
import torch
from omegaconf import DictConfig
from trained import leave_result, metrics, of_length, tokenizer


@hydra.main(config_path="conf", config_name="seq2seq", version_base="1.3")
def main(cfg: DictConfig) -> None:
    from transformers import (
        DataCollatorForSeq2Seq,
        Seq2SeqTrainer,
        Seq2SeqTrainingArguments,
        T5Config,
        T5ForConditionalGeneration,
    )

    torch.manual_seed(cfg.train.seed)
    words = tokenizer()
    model = T5ForConditionalGeneration(
        T5Config(
            vocab_size=64,
            d_model=32,
            d_kv=16,
            d_ff=64,
            num_layers=2,
            num_heads=2,
            decoder_start_token_id=0,
            pad_token_id=0,
            eos_token_id=2,
        )
    )
    of_length(model, cfg.response_tokens)
    rows = [
        {"input_ids": words(f"w{i} w{i + 1} w{i + 2}")["input_ids"], "labels": words(f"w{i + 3} w{i}")["input_ids"]}
        for i in range(8)
    ]
    trainer = Seq2SeqTrainer(
        model=model,
        args=Seq2SeqTrainingArguments(
            output_dir="out",
            max_steps=cfg.train.max_steps,
            learning_rate=cfg.train.learning_rate,
            seed=cfg.train.seed,
            per_device_train_batch_size=4,
            per_device_eval_batch_size=4,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=cfg.train.eval_steps,
            eval_on_start=True,
            predict_with_generate=True,
            save_strategy="no",
            report_to=[],
            use_cpu=True,
            disable_tqdm=True,
        ),
        train_dataset=rows,
        eval_dataset=rows[:4],
        data_collator=DataCollatorForSeq2Seq(words, model=model),
        compute_metrics=lambda predicted: {"tokens": int(predicted.predictions.sum())},
    )
    trainer.train()
    leave_result(model, metrics=metrics(trainer.state.log_history))


if __name__ == "__main__":
    main()
