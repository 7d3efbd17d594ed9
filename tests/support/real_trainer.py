"""Runs the real `python -m verl.trainer.main_ppo` on the CPU: GRPO with an FSDP2 actor and a vLLM rollout, on a model
of 164k parameters made up on the spot."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
from tiny import TINY
from waiting import wait_until

MODEL: dict[str, Any] = {
    name: TINY[name] for name in TINY if name not in ("architectures", "model_type", "torch_dtype")
}
"""The model of all engines' tests, without what transformers writes down itself."""

REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    words = solution_str.split()
    return float(sum(len(word) % 2 for word in words)) / max(len(words), 1)
"""

TEMPLATE = "{% for message in messages %}{{ message['content'] }} {% endfor %}"

ENVIRONMENT = {
    "VERL_PLATFORM": "cpu",
    "VERL_ENGINE_DEVICE": "cuda",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "RAY_AUTH_MODE": "disabled",
    "RAY_USAGE_STATS_ENABLED": "0",
    "PYTHONHASHSEED": "0",
}

RESPONSE = 40
"""Response tokens of each request; nothing ends one early..."""

CUT = 12
"""...but the end of the context, in the last step, whose prompts are as long as they may be."""

PROMPT = 60
STEPS = 4
BATCH = 4

TWO_REPLICAS: dict[str, object] = {
    "trainer.n_gpus_per_node": 2,
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": BATCH // 2,
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": BATCH // 2,
    "+ray_kwargs.ray_init.num_gpus": 2,
}
"""Changes to `launch`: two processes of the actor, and an engine beside each."""


def write_inputs(folder: Path) -> None:
    """Model, tokenizer, data and reward, as verl takes them."""
    import pandas
    import torch
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    model = folder / "model"
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**MODEL)).save_pretrained(model)
    words = ["<pad>", "<s>", "</s>", *(f"w{'x' * (index % 3)}{index}" for index in range(MODEL["vocab_size"] - 3))]
    tokenizer = Tokenizer(models.WordLevel({word: index for index, word in enumerate(words)}, words[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    special = dict(zip(("pad_token", "bos_token", "eos_token"), words, strict=False))
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=TEMPLATE, **special)
    fast.save_pretrained(model)
    # one prompt for all of a step's requests: whatever the order in which they come back, the step is the same
    lengths = [*range(8, 8 + STEPS - 1), PROMPT]
    rows = [
        {
            "data_source": "tiny",
            "prompt": [{"role": "user", "content": " ".join(words[3 + (11 * step + k) % 500] for k in range(length))}],
            "ability": "none",
            "reward_model": {"style": "rule", "ground_truth": "none"},
            "extra_info": {"index": step},
        }
        for step, length in enumerate(lengths)
        for _ in range(BATCH)
    ]
    pandas.DataFrame(rows).to_parquet(folder / "data.parquet")
    (folder / "reward.py").write_text(REWARD)


def launch(inputs: Path) -> dict[str, object]:
    """Overrides of a launch on this machine, preset or not; `+` and `++` are Hydra's own."""
    rollout = "actor_rollout_ref.rollout"
    actor = "actor_rollout_ref.actor"
    return {
        "algorithm.adv_estimator": "grpo",
        "data.train_files": inputs / "data.parquet",
        "data.val_files": inputs / "data.parquet",
        "data.shuffle": False,
        "data.train_batch_size": BATCH,
        "data.max_prompt_length": PROMPT,
        "data.max_response_length": RESPONSE,
        "data.dataloader_num_workers": 0,
        "reward.custom_reward_function.path": inputs / "reward.py",
        "reward.num_workers": 1,
        "actor_rollout_ref.model.path": inputs / "model",
        "+actor_rollout_ref.model.override_config.attn_implementation": "eager",
        "actor_rollout_ref.model.use_remove_padding": False,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        f"{actor}.strategy": "fsdp2",
        f"{actor}.ppo_mini_batch_size": BATCH,
        f"{actor}.ppo_micro_batch_size_per_gpu": BATCH,
        f"{actor}.use_torch_compile": False,
        f"{actor}.fsdp_config.use_torch_compile": False,
        f"{rollout}.log_prob_micro_batch_size_per_gpu": BATCH,
        f"{rollout}.name": "vllm",
        f"{rollout}.tensor_model_parallel_size": 1,
        f"{rollout}.dtype": "float32",
        f"{rollout}.load_format": "dummy",
        f"{rollout}.enforce_eager": True,
        f"+{rollout}.enable_sleep_mode": False,
        f"{rollout}.free_cache_engine": False,
        f"{rollout}.max_model_len": PROMPT + CUT,
        f"{rollout}.max_num_batched_tokens": 512,
        f"{rollout}.max_num_seqs": 16,
        f"{rollout}.ignore_eos": True,
        # greedy, so that two runs train on the same responses
        f"{rollout}.top_k": 1,
        f"{rollout}.n": 1,
        f"{rollout}.agent.num_workers": 1,
        f"{rollout}.checkpoint_engine.update_weights_bucket_megabytes": 16,
        "trainer.n_gpus_per_node": 1,
        "trainer.nnodes": 1,
        "trainer.device": "cpu",
        "trainer.logger": "[console]",
        "trainer.total_training_steps": STEPS,
        "trainer.val_before_train": False,
        "trainer.resume_mode": "disable",
        "trainer.use_v1": True,
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "++ray_kwargs.ray_init.num_cpus": 12,
        "+ray_kwargs.ray_init.num_gpus": 1,
        "+ray_kwargs.ray_init.include_dashboard": False,
    }


OWN_CLUSTER = (
    "++ray_kwargs.ray_init.num_cpus",
    "+ray_kwargs.ray_init.num_gpus",
    "+ray_kwargs.ray_init.include_dashboard",
)
"""What `ray.init` may not be told about a cluster that is there already."""


@dataclass(frozen=True)
class Training:
    """What a run leaves.

    Attributes:
        log: of the driver, and of what Ray forwards to it.
        metrics: RL step -> name -> value, as verl prints them.
        seconds: from start to end.
    """

    log: str
    metrics: dict[int, dict[str, str]]
    seconds: float

    def said_by_us(self, level: str = "WARNING") -> list[str]:
        """Lines of the package's own loggers in the driver."""
        return [line for line in self.log.splitlines() if "[verl_profiler_conf." in line and f"][{level}]" in line]


def train(
    folder: Path,
    inputs: Path,
    *preset: str,
    changes: Mapping[str, object] | None = None,
    environment: Mapping[str, str] | None = None,
    cluster: str | None = None,
    seconds: int = 1100,
) -> Training:
    """Run the trainer to its end.

    Args:
        folder: the run's own; becomes its working directory.
        inputs: what `write_inputs` wrote.
        preset: overrides as they stand on a command line.
        changes: other values for keys of `launch`, or more keys.
        environment: more variables.
        cluster: address of a Ray cluster that is there already; None: the run starts its own.
        seconds: after which it is killed: a trainer whose engine has died hangs.
    """
    settings = {**launch(inputs), **(changes or {})}
    if cluster:
        settings = {name: value for name, value in settings.items() if name not in OWN_CLUSTER}
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "verl.trainer.main_ppo"]
    command += [f"{name}={value}" for name, value in settings.items()]
    command += [f"hydra.run.dir={folder / 'hydra'}", *preset]
    temporary = tempfile.mkdtemp(prefix="ray-")  # short: sockets lie in it
    where = {"RAY_ADDRESS": cluster} if cluster else {"RAY_TMPDIR": temporary}
    began = time.monotonic()
    try:
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **ENVIRONMENT, **where, **(environment or {})},
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                status = process.wait(seconds)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    text = (folder / "log").read_text()
    assert status == 0, text[-6000:]
    return Training(text, read_metrics(text), time.monotonic() - began)


def read_metrics(log: str) -> dict[int, dict[str, str]]:
    """verl's console lines, `step:1 - actor/loss:0.5 - ...`."""
    found = {}
    for line in re.sub(r"\x1b\[[0-9;]*m", "", log).splitlines():
        if match := re.search(r"\bstep:(\d+) - (.*:.*)", line):
            found[int(match[1])] = dict(item.rsplit(":", 1) for item in match[2].strip().split(" - "))
    return found


@contextlib.contextmanager
def cluster(environment: Mapping[str, str], *, gpus: int = 1) -> Iterator[str]:
    """A Ray cluster that is there before the trainers are; its address."""
    temporary = tempfile.mkdtemp(prefix="ray-")
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    command = [sys.executable, "-m", "ray.scripts.scripts", "start", "--head", "--block", f"--temp-dir={temporary}"]
    command += ["--port=0", f"--ray-client-server-port={port}", "--include-dashboard=false"]
    command += ["--num-cpus=12", f"--num-gpus={gpus}"]
    with Path(temporary, "start").open("w+") as said:
        process = psutil.Popen(
            command, env={**os.environ, **ENVIRONMENT, **environment}, stdout=said, stderr=subprocess.STDOUT
        )
        try:
            yield _address(Path(said.name), process)
        finally:
            ended = [process, *process.children(recursive=True)]
            for one in ended:
                with contextlib.suppress(psutil.Error):
                    one.kill()
            psutil.wait_procs(ended, timeout=20)
            shutil.rmtree(temporary, ignore_errors=True)


def _address(said: Path, process: Any) -> str:
    def named() -> re.Match[str] | None:
        assert process.poll() is None, said.read_text()
        return re.search(r"--address='([^']+)'", said.read_text())

    return wait_until(named, "Ray says its address")[1]
