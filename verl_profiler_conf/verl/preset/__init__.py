"""The presets: which of verl's keys they set, to which values, and what is checked before a launch starts."""
