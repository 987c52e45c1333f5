"""`torchrun -m streammega.train run.toml [section.name=value ...]`: the training program."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore
from torch.distributed.rendezvous import rendezvous

from streammega.errors import ConfigError, StorageError, StreammegaError
from streammega.train.config import RunConfig, load_run
from streammega.train.devices import agree, check_backend, choose, place_of, seat_of, take
from streammega.train.loop import Trainer
from streammega.train.signals import Terminated
from streammega.train.watch import Watch

log = logging.getLogger(__name__)

TRANSPORT = re.compile(r"gloo|nccl|connection|timeout|timed out|socket|peer", re.IGNORECASE)
START_TIMEOUT = 300.0
"""Seconds that ranks may start apart."""


def run(path: str, overrides: Sequence[str]) -> None:
    """Train as the TOML file says, on the ranks that torchrun started (one, without it). Resumes by
    itself.

    Raises StreammegaError for what is wrong with the run, RankError where a collective with other
    ranks failed, Terminated where a signal ended it with a checkpoint, and Interrupted where Ctrl-C
    did so at once.
    """
    config = load_run(path, overrides)
    device, watch = _start_ranks(config)
    trainer: Trainer | None = None
    try:
        trainer = Trainer(config, device, watch)
        watch.before_exit.append(trainer.flush)
        trainer.resume()
        trainer.run()
        if trainer.ended:
            raise ConfigError(trainer.ended)
    except Terminated:
        watch.close()  # all ranks end alike: that this one falls silent is no failure
        raise
    except (KeyboardInterrupt, Exception) as error:
        failure = _failure(error, watch, config)
        if failure is error:
            raise
        raise failure from (error if isinstance(failure, RankError) else None)
    finally:
        if trainer is not None:
            trainer.flush()
    watch.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class Interrupted(Exception):
    """Ctrl-C ended the run at once: before its first step, or a second one."""


def _failure(error: BaseException, watch: Watch, config: RunConfig) -> BaseException:
    """What this rank ends with, after it has told the others why, or asked them."""
    interrupted = isinstance(error, KeyboardInterrupt) or watch.interrupted
    is_known = isinstance(error, StreammegaError | OSError)
    if watch.world > 1 and not interrupted and not is_known and _is_of_others(error):
        return _failure_of_others(error, watch)
    # From here on the thread of the watch says nothing any more.
    watch.claim()
    if interrupted:
        watch.fail("interrupted")
        return Interrupted(f"interrupted in step {watch.step}{_what_remains(watch, config)}")
    if isinstance(error, OSError) and not isinstance(error, StreammegaError):
        place = error.filename or config.train.out_dir
        reason = error.strerror or error
        error = StorageError(f"{place}: {reason}; make room there, or change train.out_dir")
    cause = str(error)
    if not isinstance(error, StreammegaError):
        cause = f"{type(error).__name__}: {error}"
    watch.fail(cause)
    return error


def _what_remains(watch: Watch, config: RunConfig) -> str:
    """What the first rank says of a run that was interrupted, if it saves."""
    if watch.rank != 0 or not config.train.save_interval:
        return ""
    return f"; the same command goes on from the last checkpoint in {config.train.out_dir}"


def _failure_of_others(error: BaseException, watch: Watch) -> BaseException:
    lines = str(error).strip().splitlines()
    reason = lines[0] if lines else type(error).__name__
    # torchrun ends ranks when one has failed: a few seconds, to say why.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print(
        f"error (rank {watch.rank}): in step {watch.step}: {reason}; asking the other ranks",
        file=sys.stderr,
        flush=True,
    )
    explained = watch.explain()
    watch.claim()
    # One that hangs does not know yet that the job is over.
    watch.fail(explained, seen=True)
    return RankError(explained)


class RankError(Exception):
    """Another rank ended the job."""


def _is_of_others(error: BaseException | None) -> bool:
    """Whether a collective failed, rather than something on this rank: transports only tell by
    their text.
    """
    while error is not None:
        if isinstance(error, dist.DistError):
            return True
        if isinstance(error, RuntimeError) and TRANSPORT.search(str(error)):
            return True
        error = error.__cause__
    return False


def _start_ranks(config: RunConfig) -> tuple[torch.device, Watch]:
    """Join the job's process group, if there is more than one rank: the device of this rank, and
    its watch.
    """
    train = config.train
    place = place_of(os.environ)
    seat = seat_of(place)
    if place.world == 1:
        choice = choose([seat], train, nccl=False)
        return take(choice, seat), Watch(None, 0, 1)
    patience = timedelta(seconds=max(train.timeout, START_TIMEOUT))
    with _meeting():
        store, rank, world = next(rendezvous("env://", timeout=patience))
        store.set_timeout(patience)
        # the store outlives a restart: what was said before is void
        attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        store = PrefixStore(f"attempt-{attempt}", store)
        choice = agree(PrefixStore("devices", store), seat, world, train)
    check_backend(choice, config.parallel)
    if choice.said and rank == 0:
        log.warning("%s", choice.said)
    device = take(choice, seat)
    shared = PrefixStore("default", store)
    with _meeting():
        dist.init_process_group(
            choice.backend, store=shared, rank=rank, world_size=world, timeout=patience
        )
    return device, Watch(PrefixStore("watch", store), rank, world, train.timeout)


@contextlib.contextmanager
def _meeting() -> Iterator[None]:
    """Raise ConfigError where torch finds that the ranks cannot meet."""
    try:
        yield
    except StreammegaError:
        raise
    except (ValueError, RuntimeError) as error:
        # A variable is missing or wrong; the address is taken, or somebody does not come.
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(
            f"the ranks cannot meet ({reason}): set RANK, WORLD_SIZE, MASTER_ADDR and MASTER_PORT "
            f"for every process, or let torchrun start them"
        ) from None


def main(arguments: Sequence[str], name: str | None = None) -> int:
    """The command line. Known errors are one message on every rank that has them, not a traceback.

    name: what messages begin with; default: "error (rank 0)" and so on.
    """
    rank = os.environ.get("RANK", "0")
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"[{rank}] %(message)s", stream=sys.stderr)
    # which tells at each start where credentials were found
    logging.getLogger("botocore").setLevel(logging.WARNING)
    if not arguments or arguments[0] in ("-h", "--help"):
        usage = "torchrun --nproc-per-node N -m streammega.train run.toml [section.name=value ...]"
        print(f"usage: {usage}\n\n{__doc__}")
        return 0 if arguments else 2
    try:
        run(arguments[0], arguments[1:])
    except (StreammegaError, RankError) as error:
        print(f"{name or f'error (rank {rank})'}: {error}", file=sys.stderr)
        return 1
    except Terminated as stopped:
        print(f"[{rank}] {stopped}", file=sys.stderr)
        return 128 + stopped.number
    except (Interrupted, KeyboardInterrupt) as stopped:
        print(f"[{rank}] {stopped or 'interrupted'}", file=sys.stderr)
        return 128 + signal.SIGINT
    except Exception:  # a defect: its traceback, and then the same end as for other errors
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        # threads that wait for ranks which are gone keep a process; gloo's may abort it as it ends
        os._exit(code)
    sys.exit(code)
