"""Tokens as a dataset: segments, shards, and the moment they appear."""
