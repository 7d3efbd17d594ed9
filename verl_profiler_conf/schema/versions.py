"""Installed versions of Hydra and OmegaConf, for the few places where releases differ."""

from __future__ import annotations

import hydra
import omegaconf

HYDRA = tuple(int(part) for part in hydra.__version__.split(".")[:2])
OMEGACONF = tuple(int(part) for part in omegaconf.__version__.split(".")[:2])
