"""Reads traces of any size: their events, the figures that follow from them, and parts of a trace."""
