"""A Lightning app as its Hydra template has it: data, model and trainer are made from the config, and validation makes
responses. Lightning validates once before training, as a sanity check."""

from __future__ import annotations

from typing import Any

import hydra
import lightning
import torch
from omegaconf import DictConfig
from trained import leave_result, llama


class Words(lightning.LightningDataModule):
    def __init__(self, batch_size: int) -> None:
        super().__init__()
        self.batch_size = batch_size
        self.rows = torch.arange(8 * 6).reshape(8, 6) % 60 + 4

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows, batch_size=self.batch_size)

    def val_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(self.rows[: self.batch_size], batch_size=self.batch_size)


class Responder(lightning.LightningModule):
    def __init__(self, response_tokens: int, learning_rate: float) -> None:
        super().__init__()
        self.llama = llama(response_tokens)
        self.learning_rate = learning_rate
        self.responses: list[Any] = []
        self.losses: list[float] = []

    def training_step(self, batch: Any, _: int) -> Any:
        loss = self.llama(input_ids=batch, labels=batch).loss
        self.losses.append(float(loss))
        return loss

    def validation_step(self, batch: Any, _: int) -> None:
        made = self.llama.generate(batch, attention_mask=torch.ones_like(batch), do_sample=True)
        self.responses.append(made.tolist())

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=self.learning_rate)


@hydra.main(config_path="conf", config_name="lightning", version_base="1.3")
def main(cfg: DictConfig) -> None:
    lightning.seed_everything(cfg.seed, workers=True)
    data = hydra.utils.instantiate(cfg.data)
    model = hydra.utils.instantiate(cfg.model)
    trainer = hydra.utils.instantiate(cfg.trainer)
    trainer.fit(model=model, datamodule=data)
    leave_result(model, responses=model.responses, losses=model.losses)


if __name__ == "__main__":
    main()
