"""A launcher that composes its config itself, as ROLL's do: no Hydra run, so that no callback is ever called. The two
lines that it has for profiling are the import and the `with`."""

import argparse

from hydra import compose, initialize
from omegaconf import OmegaConf

from verl_profiler_conf import activate
from verl_profiler_conf.engines.loop import decode_loop

parser = argparse.ArgumentParser()
parser.add_argument("--config_name")
arguments = parser.parse_args()

initialize(config_path="conf", job_name="app", version_base=None)
cfg = compose(config_name=arguments.config_name)
plain = OmegaConf.to_container(cfg, resolve=True)
with activate(cfg), decode_loop(rows=2) as loop:
    for _ in range(12):
        with loop.iteration():
            pass
print("RAN", sorted(plain))
