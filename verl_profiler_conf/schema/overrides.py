"""The overrides that a launch was given, as they were written."""

from __future__ import annotations

from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf


def written_overrides(config: DictConfig | ListConfig, kind: str) -> list[str] | None:
    """Texts of `hydra.overrides`; None: no launch of Hydra's has made this config.

    An interpolation in such a text (`data.dir=${.root}`) belongs to the place that it is set at. Read as an element of
    Hydra's list it would lead elsewhere, or nowhere.

    Args:
        config: as composed, with the `hydra` node.
        kind: `task` or `hydra`.
    """
    node = OmegaConf.select(config, "hydra.overrides", throw_on_missing=False)
    if not isinstance(node, DictConfig):
        return None
    plain: Any = OmegaConf.to_container(node, resolve=False)
    return [str(text) for text in plain.get(kind) or ()]
