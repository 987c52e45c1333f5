"""`torchrun -m streammega.train run.toml [section.name=value ...]`: the training program."""

from __future__ import annotations

import json
import os
import re
import signal
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import torch.distributed as dist

from streammega.errors import ConfigError, StorageError, StreammegaError
from streammega.errors.logs import log_to_stderr, set_log_level
from streammega.errors.process import (
    describe_defect,
    replace_unknown_letters,
)
from streammega.errors.redaction import redact
from streammega.train.config import RunConfig, load_run
from streammega.train.devices import start_ranks
from streammega.train.signals import StopNow, Terminated
from streammega.train.trainer import Trainer

SILENCE_S = 20.0
"""Seconds that ranks under torchrun wait before they repeat an error of the settings. It ends them
when the first rank has exited, which may have started seconds later on a busy host.
"""
TRANSPORT = re.compile(r"gloo|nccl|connection|timeout|timed out|socket|peer", re.IGNORECASE)


def run(path: str, overrides: Sequence[str]) -> None:
    """Train as the TOML file says, on the ranks that torchrun started (one, without it). Resumes by
    itself.

    Raises StreammegaError for what is wrong with the run, RankError where a collective with other
    ranks failed, Terminated where a signal ended it with a checkpoint, and Interrupted where one
    did so at once.
    """
    config = load_run(path, overrides)
    device = start_ranks(config)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, device)
        trainer.resume()
        trainer.run()
    except (KeyboardInterrupt, Exception) as error:
        failure = _explain(error, 0 if trainer is None else trainer.step_under_way, config)
        if failure is error:
            raise
        raise failure from (error if isinstance(failure, RankError) else None)
    if dist.is_initialized():
        dist.destroy_process_group()


class Interrupted(Exception):
    """A signal ended the run at once: Ctrl-C before its first step, or a second signal. `number`: of it."""

    def __init__(self, message: str, number: int) -> None:
        super().__init__(message)
        self.number = number


class RankError(Exception):
    """A collective with other ranks failed: one of them has ended, or hangs."""


def _explain(error: BaseException, step: int, config: RunConfig) -> BaseException:
    """The error that this rank ends with."""
    place = config.train.out_dir
    if isinstance(error, KeyboardInterrupt):
        number = error.number if isinstance(error, StopNow) else signal.SIGINT
        how = (
            "interrupted"
            if number == signal.SIGINT
            else f"stopped by {signal.Signals(number).name}"
        )
        text = f"{how} in step {step}"
        is_first_rank = not dist.is_initialized() or dist.get_rank() == 0
        if is_first_rank and config.train.save_interval:
            text += (
                f"; the same command goes on from the last checkpoint in {place}, if there is one"
            )
        return Interrupted(text, number)
    is_ours = isinstance(error, StreammegaError)
    if isinstance(error, OSError) and not is_ours:
        reason = error.strerror or str(error)
        return StorageError(
            f"{error.filename or place}: {reason}; "
            f"check permissions and free space there, or change train.out_dir"
        )
    if dist.is_initialized() and not is_ours and _is_of_others(error):
        reason, *_ = [*str(error).strip().splitlines(), type(error).__name__]
        return RankError(
            f"in step {step}: another rank has ended, or did not come within "
            f"train.collective_timeout = {config.train.collective_timeout:g} s ({reason}); "
            f"the log of that rank says why"
        )
    return error


def _is_of_others(error: BaseException | None) -> bool:
    """Whether a collective failed, and not something on this rank. Errors of transports can only be
    recognised by their text.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and TRANSPORT.search(str(error)):
            return True
        error = error.__cause__
    return False


def main(arguments: Sequence[str], name: str | None = None) -> int:
    """Run the command line; the exit code. A known error is one message on each rank that has it.

    name: what messages begin with; default: "error (rank 0)" and so on.
    """
    rank = os.environ.get("RANK", "0")
    name = name or f"error (rank {rank})"
    log_to_stderr(f"[{rank}] ")
    replace_unknown_letters()
    try:
        set_log_level("INFO" if rank == "0" else "WARNING")
        if not arguments or arguments[0] in ("-h", "--help"):
            usage = (
                "torchrun --nproc-per-node N -m streammega.train run.toml [section.name=value ...]"
            )
            print(f"usage: {usage}\n\n{__doc__}")
            return 0 if arguments else 2
        run(arguments[0], arguments[1:])
    except (StreammegaError, RankError) as error:
        _print_error(name, str(error), is_on_all_ranks=isinstance(error, ConfigError))
        return 1
    except Terminated as stopped:
        print(f"[{rank}] {stopped}", file=sys.stderr)
        return 128 + stopped.number
    except Interrupted as stopped:
        print(f"[{rank}] {stopped}", file=sys.stderr)
        return 128 + stopped.number
    except KeyboardInterrupt:
        print(f"[{rank}] interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception as error:
        _print_error(name, describe_defect(error))
        return 1
    return 0


def _print_error(name: str, text: str, *, is_on_all_ranks: bool = False) -> None:
    """Print what ends this rank, and leave it where torchrun looks for the causes that it prints last.

    is_on_all_ranks: the first rank of this host prints the same. torchrun then ends the others while
    they wait.
    """
    file = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if file and is_on_all_ranks and os.environ.get("LOCAL_RANK", "0") != "0":
        time.sleep(SILENCE_S)
    text = redact(text)
    print(f"{name}: {text}", file=sys.stderr, flush=True)
    if file:
        # Source: torch.distributed.elastic.multiprocessing.errors, ErrorHandler.record_exception.
        cause = {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}
        Path(file).write_text(json.dumps({"message": cause}), encoding="utf-8")
