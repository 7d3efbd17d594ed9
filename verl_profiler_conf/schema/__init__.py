"""What a user may write, and how it is read out of a config."""
