"""The presets: which of verl's keys they set, to what, and what is held against a launch before it starts."""
