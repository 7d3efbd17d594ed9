"""transformers, in the job's own process."""
