"""All that only verl knows: the presets for its trainers, and the hooks in its servers and clients."""
