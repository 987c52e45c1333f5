"""Reads in flight: in order of need, under limits, tried again."""
