"""The window in an engine's own counters, for processes that cannot load a hook."""
