"""A decode loop of one's own under torchrun: each rank is a Hydra run of its own, and rolls out its share of prompts.

torchrun --standalone --nproc-per-node 2 examples/ddp.py
torchrun --standalone --nproc-per-node 2 examples/ddp.py hydra.run.dir=outputs/ddp profiler.ranks=[1] \
    +profiler=torch_window profiler.profile_token_start=20 profiler.profile_token_end=80
"""

from __future__ import annotations

import logging

import hydra
import torch
import torch.distributed as dist
from omegaconf import DictConfig
from torch import Tensor, nn

from verl_profiler_conf import decode_loop

log = logging.getLogger("ddp")


class Policy(nn.Module):
    """A recurrent language model: token and state in, logits and state out."""

    def __init__(self, vocab_size: int, hidden_size: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab_size, hidden_size)
        self.cell = nn.GRUCell(hidden_size, hidden_size)
        self.head = nn.Linear(hidden_size, vocab_size)

    def forward(self, token: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        state = self.cell(self.embed(token), state)
        return self.head(state), state


@torch.no_grad()
def rollout(policy: nn.Module, prompts: Tensor, hidden_size: int, response_tokens: int) -> Tensor:
    """Greedy responses, [rows, response_tokens], to prompts of one token each, [rows]."""
    token, state = prompts, torch.zeros(len(prompts), hidden_size)
    response = []
    with decode_loop(rows=len(prompts)) as loop:
        for _ in range(response_tokens):
            with loop.iteration():
                logits, state = policy(token, state)
                token = logits.argmax(dim=-1)
            response.append(token)
    return torch.stack(response, dim=1)


@hydra.main(version_base="1.3", config_path="conf", config_name="ddp")
def main(cfg: DictConfig) -> None:
    dist.init_process_group("gloo")
    try:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(cfg.seed)
        policy = nn.parallel.DistributedDataParallel(Policy(cfg.vocab_size, cfg.hidden_size))
        prompts = torch.arange(cfg.prompts)[rank::ranks]
        responses = rollout(policy, prompts, cfg.hidden_size, cfg.response_tokens)
        log.info("rank %d: %d responses of %d tokens", rank, *responses.shape)
        dist.barrier()
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
