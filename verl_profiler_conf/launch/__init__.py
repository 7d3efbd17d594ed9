"""A Hydra job, from its composed config to the one summary at its end."""
