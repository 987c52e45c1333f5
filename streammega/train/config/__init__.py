"""A run's settings: a TOML file, overrides on the command line, checked before anything starts."""

from streammega.train.config.optimization import TrainConfig
from streammega.train.config.run_file import load_run
from streammega.train.config.sizes import ModelConfig, ParallelConfig
from streammega.train.config.whole_run import RunConfig

__all__ = ["ModelConfig", "ParallelConfig", "RunConfig", "TrainConfig", "load_run"]
