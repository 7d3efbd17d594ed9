"""A Hydra job, from its composed config to the summary at its end."""
