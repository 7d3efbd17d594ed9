"""An ordinary Hydra app: a small Llama with random weights rolls out a batch of prompts. It knows nothing of profiling.

python examples/rollout.py
python examples/rollout.py +profiler=torch_window profiler.profile_token_start=20 profiler.profile_token_end=80
python examples/rollout.py engine=vllm +profiler=torch_window ...
"""

from __future__ import annotations

import logging
import random

import hydra
from engines import ROLLOUTS
from omegaconf import DictConfig

log = logging.getLogger("rollout")


@hydra.main(version_base="1.3", config_path="conf", config_name="rollout")
def main(cfg: DictConfig) -> None:
    words = random.Random(cfg.seed)
    prompts = [[words.randrange(3, cfg.model.vocab_size) for _ in range(cfg.prompt_tokens)] for _ in range(cfg.prompts)]
    responses = ROLLOUTS[cfg.engine.name](cfg, prompts)
    log.info("%d responses of %d tokens", len(responses), len(responses[0]))


if __name__ == "__main__":
    main()
