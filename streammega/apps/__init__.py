"""Commands for people, by the public API alone: what they do, any program can do."""
