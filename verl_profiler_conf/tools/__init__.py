"""What a person runs by hand, after a capture or before one."""
