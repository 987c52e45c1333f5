"""A run's settings: a TOML file, overrides on the command line, checked before anything starts."""

from streammega.train.config.run import RunConfig, load_run
from streammega.train.config.settings import ModelConfig, ParallelConfig, TrainConfig

__all__ = ["ModelConfig", "ParallelConfig", "RunConfig", "TrainConfig", "load_run"]
