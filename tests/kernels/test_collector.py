"""Python's collector takes what was imported for old, and what others froze stays frozen."""

from __future__ import annotations

import gc
import os
import subprocess
import sys

import pytest

from streammega.kernels.collector import take_as_old


def test_objects_are_taken_as_old_without_a_look_and_are_still_collected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # what the suite froze was noted, and nothing would be done
    monkeypatch.setattr("streammega.kernels.collector._FROZEN_BY_OTHERS", [])
    were_frozen = gc.get_freeze_count()
    gc.unfreeze()
    gc.collect()
    never_ending = gc.get_freeze_count()  # some hundred objects from Python 3.12 on
    looks = []
    gc.callbacks.append(lambda phase, told: looks.append(told["generation"]))
    try:
        ring: list[object] = []
        ring.append(ring)
        del ring
        take_as_old()
        assert looks == []
        assert gc.get_freeze_count() in (0, never_ending)
        assert gc.get_count()[1:] == (0, 0)
        assert gc.collect() >= 1, "the ring is out of the collector's sight"
    finally:
        gc.callbacks.pop()
        if were_frozen:  # by the suite, so that its processes share what was imported
            gc.freeze()


def test_what_a_program_froze_stays_frozen() -> None:
    were_frozen = gc.get_freeze_count()
    gc.freeze()
    try:
        take_as_old()
        # thawed there would be none; some end by themselves, in other threads too
        assert gc.get_freeze_count() > 0
    finally:
        if not were_frozen:  # else by the suite, and all later tests would be looked through
            gc.unfreeze()


ENDS = """
import atexit, gc
from streammega.kernels.collector import end_without_a_look

class Written:
    def __del__(self):
        print("closed")

# what is registered first is called last
atexit.register(lambda: print(gc.get_freeze_count() > 1000))
written = Written()
written.itself = written
end_without_a_look()
end_without_a_look()
del written
"""


def test_a_process_ends_without_a_look_at_what_is_old_and_closes_what_is_young() -> None:
    environment = os.environ | {"PYTHONPATH": os.getcwd()}
    ended = subprocess.run(
        [sys.executable, "-c", ENDS], env=environment, capture_output=True, text=True, check=True
    )
    assert ended.stdout.split() == ["closed", "True"]
