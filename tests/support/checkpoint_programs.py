"""What tests of checkpoints run as ranks, in processes of their own that may be killed anywhere."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from streammega.storage.backends.local import LocalWriter, PreadStore
from streammega.storage.backends.obstore import ObstoreStore, ObstoreWriter
from streammega.train.checkpoints import out_dir
from streammega.train.checkpoints.store import CheckpointStore
from streammega.train.config import load_run
from streammega.train.trainer import Trainer

WRITERS = (LocalWriter, ObstoreWriter)
WRITES = 8
"""Of the writes one in so many is a point to be killed at: each tensor is one."""


def checkpoint_records(folder: Path) -> list[Path]:
    """The records of whole checkpoints in a folder, oldest first."""
    return sorted(path for path in folder.glob("step-*.json") if "." not in path.stem)


def files_of(record: Path) -> Path:
    """The folder of the files of a checkpoint on a disk."""
    folder = json.loads(record.read_text())["files"]
    return record.with_name(folder)


def position_of(record: Path) -> dict[str, Any]:
    """What was saved beside the tensors."""
    position: dict[str, Any] = json.loads(record.read_text())["position"]
    return position


def train_steps(rank: int, run_file: str, overrides: list[str], device: str = "cpu") -> int:
    """Resume and train to the end; the step that was resumed from."""
    os.chdir(Path(run_file).parent)  # of metrics, where out_dir is a URL
    trainer = Trainer(load_run(run_file, overrides), torch.device(device))
    trainer.resume()
    began = trainer.step
    trainer.run()
    return began


def train_and_die(
    rank: int, run_file: str, overrides: list[str], fatal: int | None, done: str
) -> int:
    """Train to the end, but SIGKILL before the `fatal`-th change of what is stored; else how many
    there were.

    done: a file to which the step of every checkpoint is appended that was published.
    """
    changes = 0
    lock = threading.Lock()

    def counted(function: Callable[..., Any], of_them: int = 1) -> Callable[..., Any]:
        """The function, every `of_them`-th call of which is a change."""
        calls = 0

        def change(*args: Any, **kwargs: Any) -> Any:
            nonlocal changes, calls
            with lock:
                if calls % of_them == 0:
                    if changes == fatal:
                        os.kill(os.getpid(), signal.SIGKILL)
                    changes += 1
                calls += 1
            return function(*args, **kwargs)

        return change

    for name in ("replace", "mkdir", "unlink", "rmdir", "fsync"):
        setattr(os, name, counted(getattr(os, name)))
    for kind, name in ((ObstoreWriter, "commit"), (ObstoreStore, "delete")):
        setattr(kind, name, counted(getattr(kind, name)))
    for writer in WRITERS:
        writer.write = counted(writer.write, WRITES)  # type: ignore[method-assign]

    def noted(publish: Callable[..., None]) -> Callable[..., None]:
        def publish_and_note(self: Any, step: int, *rest: Any) -> None:
            publish(self, step, *rest)
            with open(done, "a") as file:
                file.write(f"{step}\n")

        return publish_and_note

    CheckpointStore.publish = noted(CheckpointStore.publish)  # type: ignore[method-assign]
    train_steps(rank, run_file, overrides)
    return changes


def train_slowly(
    rank: int, run_file: str, overrides: list[str], seconds: float, begun: str, device: str = "cpu"
) -> int:
    """Train while every write of a checkpoint takes some time; `begun`: a file that comes with the
    second save.
    """
    saves = Trainer.save
    count = 0

    def slow(write: Callable[..., None]) -> Callable[..., None]:
        def write_slowly(self: Any, data: Any) -> None:
            time.sleep(seconds)
            write(self, data)

        return write_slowly

    def counted(self: Any, **options: Any) -> None:
        nonlocal count
        count += 1
        saves(self, **options)
        if count == 2 and rank == 0:
            Path(begun).touch()

    for writer in WRITERS:
        writer.write = slow(writer.write)  # type: ignore[method-assign]
    Trainer.save = counted  # type: ignore[method-assign]
    return train_steps(rank, run_file, overrides, device)


def outcome(rank: int, run_file: str, overrides: list[str], patience: float) -> tuple[str, float]:
    """How a run ended on a rank, and the seconds that its making took.

    The error's kind and text, or nothing.
    """
    out_dir.VISIBLE_SECONDS = patience
    began = time.monotonic()
    try:
        trainer = Trainer(
            load_run(run_file, [text.replace("RANK", str(rank)) for text in overrides]),
            torch.device("cpu"),
        )
        trainer.resume()
        trainer.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def failing_save(
    rank: int, run_file: str, overrides: list[str], failing: int, at_step: int
) -> tuple[str, int]:
    """A run of which one rank cannot write its file of a step: the error of this rank, and its step."""
    open_writer = PreadStore.open_writer

    def full(self: Any, key: str) -> LocalWriter:
        if f"step-{at_step:08d}-" in key and key.endswith(f"__{failing}_0.distcp"):
            raise OSError(errno.ENOSPC, "No space left on device", key)
        return open_writer(self, key)

    PreadStore.open_writer = full  # type: ignore[method-assign]
    trainer = Trainer(load_run(run_file, overrides), torch.device("cpu"))
    step = Trainer.train_step

    def slow(self: Any) -> Any:
        time.sleep(0.05)
        return step(self)

    Trainer.train_step = slow  # type: ignore[method-assign]
    try:
        trainer.run()
    except Exception as error:
        return f"{type(error).__name__}: {error}", trainer.step
    finally:
        Trainer.train_step = step  # type: ignore[method-assign]
        PreadStore.open_writer = open_writer  # type: ignore[method-assign]
    return "", trainer.step


def hold(rank: int, run_file: str, overrides: list[str], held: str) -> None:
    """Train a step, and stay."""
    os.chdir(Path(run_file).parent)
    trainer = Trainer(load_run(run_file, overrides), torch.device("cpu"))
    trainer.train_step()
    trainer.step += 1
    trainer.save()
    Path(held).touch()
    time.sleep(1000)
