"""Every crash and every fault of each scene of tests/support/crash_scenes.py, with counts.

    python tools/crash.py [SCENE ...] [--again]

It goes on where it was ended, unless the code has changed since: crash-progress.json says how far each
scene is. `--again` forgets that.
A failure ends it, with the operations before it; the next run begins with that case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.crash_runs import Crashes, Scene  # noqa: E402
from tests.support.crash_scenes import SCENES  # noqa: E402

PROGRESS = ROOT / "crash-progress.json"
SAVE_SECONDS = 5.0


def main() -> None:
    """Run the scenes that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    names = [scene.__name__ for scene in SCENES]
    parser.add_argument(
        "scenes", nargs="*", choices=[[], *names], metavar="SCENE", help=", ".join(names)
    )
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.again:
        PROGRESS.unlink(missing_ok=True)
    for scene in SCENES:
        if not arguments.scenes or scene.__name__ in arguments.scenes:
            run_scene(scene)


def run_scene(scene: type[Scene]) -> None:
    """All cases of a scene that are not done yet, and a line of counts."""
    progress = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
    name = scene.__name__
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        crashes = Crashes(scene(Path(folder), patch))
        done = progress.get(name, {})
        now = {"cases": len(crashes.cases), "code": digest_of_code()}
        if not now.items() <= done.items():
            done = {**now, "next": 0, "seconds": 0.0, "counts": {}}
        crashes.counts = Counter(done["counts"])
        first = done["next"]
        before = done["seconds"]
        began = last_save = time.monotonic()

        def save(number: int) -> None:
            done.update(next=number, seconds=before + time.monotonic() - began)
            done["counts"] = dict(sorted(crashes.counts.items()))
            PROGRESS.write_text(json.dumps(progress | {name: done}, indent=1))

        for number in range(first, len(crashes.cases)):
            if time.monotonic() - last_save > SAVE_SECONDS:
                save(number)
                last_save = time.monotonic()
            try:
                crashes.try_case(crashes.cases[number])
            except BaseException:
                save(number)
                raise
        save(len(crashes.cases))
        changes = len(crashes.recorder.changes)
        operations = len(crashes.recorder.can_fail)
        print(
            f"{name}: {changes} changes, {operations} operations that can fail, "
            f"{len(crashes.cases)} cases, {done['seconds']:.0f} s: {json.dumps(done['counts'])}",
            flush=True,
        )


def digest_of_code() -> str:
    """Of the library and of the scenes: counts of other code say nothing."""
    files = [*ROOT.glob("streammega/**/*.py"), *ROOT.glob("tests/support/crash_*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


if __name__ == "__main__":
    main()
