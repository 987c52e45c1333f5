"""The training program: example model, loop, checkpoints. The loader works without any of it."""
