"""The app of the documentation's commands: `python train.py`. A decode loop of one's own, no model."""

from __future__ import annotations

import logging

import hydra
from omegaconf import DictConfig

from verl_profiler_conf import decode_loop

log = logging.getLogger("train")


@hydra.main(version_base="1.3", config_path="conf", config_name="train")
def main(cfg: DictConfig) -> None:
    import torch

    weights = torch.ones(64, 64)
    with decode_loop(rows=4) as loop:
        for _ in range(cfg.data.max_response_length):
            with loop.iteration():
                weights = weights @ weights * 0
    log.info("4 responses of %d tokens", cfg.data.max_response_length)


if __name__ == "__main__":
    main()
