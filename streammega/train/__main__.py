"""`torchrun -m streammega.train run.toml [section.name=value ...]`: the training program."""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import traceback
from collections.abc import Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from streammega.errors import ConfigError, StorageError, StreammegaError
from streammega.train.config import load_run
from streammega.train.loop import Terminated, Trainer
from streammega.train.watch import Watch

TRANSPORT = re.compile(r"gloo|nccl|connection|timeout|timed out|socket|peer", re.IGNORECASE)
START_TIMEOUT = 300.0
"""Seconds that ranks may start apart."""


def run(path: str, overrides: Sequence[str]) -> None:
    """Train as the TOML file says, on the ranks that torchrun started (one, without it). Resumes by itself.

    Raises StreammegaError for what is wrong with the run, and RankError where a collective with other ranks failed.
    """
    config = load_run(path, overrides)
    device, watch = _start_ranks(config.train.timeout)
    try:
        trainer = Trainer(config, device, watch)
        trainer.resume()
        trainer.run()
        if trainer.ended:
            raise ConfigError(trainer.ended)
    except StreammegaError as error:
        watch.fail(str(error))
        raise
    except OSError as error:
        cause = f"{error.filename or config.train.out_dir}: {error.strerror or error}; make room there, or change train.out_dir"
        watch.fail(cause)
        raise StorageError(cause) from None
    except (Terminated, KeyboardInterrupt):
        raise
    except Exception as error:
        if watch.world == 1 or not _is_of_others(error):
            watch.fail(f"{type(error).__name__}: {error}")
            raise
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # torchrun ends ranks when one has failed: a few seconds, to say why
        print(f"error (rank {watch.rank}): in step {watch.step}: {reason}; asking the other ranks", file=sys.stderr, flush=True)
        raise RankError(watch.explain()) from error
    watch.close()
    if dist.is_initialized():
        dist.destroy_process_group()


class RankError(Exception):
    """Another rank ended the job."""


def _is_of_others(error: BaseException | None) -> bool:
    """Whether a collective failed, rather than something on this rank: transports only tell by their text."""
    while error is not None:
        if isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and TRANSPORT.search(str(error))):
            return True
        error = error.__cause__
    return False


def _start_ranks(timeout: float) -> tuple[torch.device, Watch]:
    """Join torchrun's process group (NCCL where CUDA is, else gloo): the device of this rank, and its watch."""
    cuda = torch.cuda.is_available()
    rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world == 1:
        return device, Watch(None, 0, 1)
    store, rank, world = next(rendezvous("env://"))
    patience = timedelta(seconds=max(timeout, START_TIMEOUT))
    store.set_timeout(patience)
    backend = "cpu:gloo,cuda:nccl" if cuda else "gloo"
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")  # the store outlives a restart: what was said before is void
    store = PrefixStore(f"attempt-{attempt}", store)
    shared = PrefixStore("default", store)
    dist.init_process_group(backend, store=shared, rank=rank, world_size=world, timeout=patience)
    return device, Watch(PrefixStore("watch", store), rank, world)


def main(arguments: Sequence[str]) -> int:
    """The command line. Known errors are one message on every rank that has them, not a traceback."""
    rank = os.environ.get("RANK", "0")
    level = logging.INFO if rank == "0" else logging.WARNING
    logging.basicConfig(level=level, format=f"[{rank}] %(message)s", stream=sys.stderr)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(f"usage: torchrun --nproc-per-node N -m streammega.train run.toml [section.name=value ...]\n\n{__doc__}")
        return 0 if arguments else 2
    try:
        run(arguments[0], arguments[1:])
    except (StreammegaError, RankError) as error:
        print(f"error (rank {rank}): {error}", file=sys.stderr)
        return 1
    except Terminated as stopped:
        print(f"[{rank}] {stopped}", file=sys.stderr)
        return 143
    except KeyboardInterrupt:
        return 130
    except Exception:  # a defect: its traceback, and then the same end as for other errors
        traceback.print_exc()
        return 1
    return 0


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        os._exit(code)  # threads that wait for ranks which are gone keep a process; gloo's may abort it as it ends
    sys.exit(code)
