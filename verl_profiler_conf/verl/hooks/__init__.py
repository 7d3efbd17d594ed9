"""The hooks in verl's rollout servers and their clients."""
