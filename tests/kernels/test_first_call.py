"""numba is made ready on a thread while a program is on its way to its data."""

from __future__ import annotations

import subprocess
import sys

import pytest

from streammega.kernels import collector

READY = """
import sys, threading
import streammega.loading
first = [thread for thread in threading.enumerate() if thread.name == "numba-first-call"]
for thread in first:
    thread.join()
from streammega.kernels.plan import copy_bytes
print(copy_bytes.signatures != [])
"""
FORKED = """
import os, sys
import streammega.loading
import numpy as np
child = os.fork()
if child == 0:
    from streammega.kernels.batch import count_up
    rows = np.zeros((1, 3), np.int64)
    count_up(rows)
    os._exit(0 if rows.tolist() == [[0, 1, 2]] else 1)
print(os.waitpid(child, 0)[1] == 0)
"""
ENDED = """
import sys, threading
from streammega.kernels import first_call

class Waits:
    def find_spec(self, name, path=None, target=None):
        if name == "first_of_two":
            begun.set()
            ends[0].wait(60.0)  # of the main thread, when it ends
        if name in ("first_of_two", "second_of_two"):
            print(name)
            raise ModuleNotFoundError(name)

ends = []
begun = threading.Event()
sys.meta_path.insert(0, Waits())
prepare = first_call._prepare
def noted(event):
    ends.append(event)
    prepare(event)
first_call._prepare = noted
first_call._call = lambda: print("called")
first_call.MODULES = ("first_of_two", "second_of_two")
first_call.begin()
begun.wait(60.0)
"""


def printed(program: str) -> str:
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    )
    return run.stdout.strip()


def test_a_program_that_imports_the_loader_has_made_numbas_first_call() -> None:
    assert printed(READY) == "True"


def test_a_fork_right_after_the_import_leaves_a_child_that_computes() -> None:
    assert printed(FORKED) == "True"


def test_a_program_that_ends_meanwhile_waits_for_no_more_than_one_step_of_it() -> None:
    assert printed(ENDED) == "first_of_two"


def test_frozen_objects_are_counted_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Counting looks at each of them: at every dataset that is opened it would take its time."""
    counted = []

    def count() -> int:
        counted.append(1)
        return 500_000

    monkeypatch.setattr(collector, "_FROZEN_BY_OTHERS", [])
    monkeypatch.setattr("gc.get_freeze_count", count)
    for _ in range(3):
        collector.take_as_old()
    assert len(counted) == 1
