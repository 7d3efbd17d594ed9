"""The configs. A regular package: Hydra 1.4 does not read configs from a namespace package."""
