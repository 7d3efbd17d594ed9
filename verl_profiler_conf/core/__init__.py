"""Numbers and rules: what a window is, which iterations belong to it, and what the settings may say.

Nothing here knows torch, an engine, OmegaConf, a clock or a disk, so every branch is tested with plain values.
"""
