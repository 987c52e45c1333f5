"""Every crash and every fault of each scene of tests/support/crash_scenes.py, and SIGKILL at random
moments of those of crash_kills.py, with counts.

    python tools/crash.py [SCENE ...] [--kills] [--again]

It goes on where it was ended, unless the code has changed since: crash-progress.json says how far each
scene is. `--again` forgets that.
A failure ends it, with the operations before it; the next run begins with that case.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.support.crash_kills import KILLED, Kills, in_child  # noqa: E402
from tests.support.crash_runs import Crashes, Scene  # noqa: E402
from tests.support.crash_scenes import SCENES  # noqa: E402
from tests.support.servers import moto_server  # noqa: E402

PROGRESS = ROOT / "crash-progress.json"
SAVE_SECONDS = 5.0
MOMENTS = 101
"""How often a scene is killed. That makes somewhat more than a thousand kills of all scenes."""
ALL: dict[str, tuple[type[Scene], bool]] = {
    **{scene.__name__: (scene, False) for scene in SCENES},
    **{f"Killed{scene.__name__}": (scene, True) for scene in KILLED},
}
"""By name: the scene, and whether its processes are killed."""


def main() -> None:
    """Run the scenes that are named, or all, each in a process of its own: kills need one without
    threads.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument(
        "scenes", nargs="*", choices=[[], *ALL], metavar="SCENE", help=", ".join(ALL)
    )
    parser.add_argument("--kills", action="store_true", help="only scenes of kills")
    parser.add_argument("--again", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if arguments.again:
        PROGRESS.unlink(missing_ok=True)
    for name, (_, is_killed) in ALL.items():
        if name in (arguments.scenes or ALL) and is_killed >= arguments.kills:
            process = multiprocessing.get_context("fork").Process(target=run_scene, args=(name,))
            process.start()
            process.join()
            if process.exitcode:
                sys.exit(1)


def run_scene(name: str) -> None:
    """All cases of a scene that are not done yet, and a line of counts."""
    progress = json.loads(PROGRESS.read_text()) if PROGRESS.exists() else {}
    scene, is_killed = ALL[name]
    with (
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
        ExitStack() as stack,
    ):
        crashes: Crashes | Kills
        if is_killed:
            server = stack.enter_context(moto_server())
            bucket = in_child(server.new_bucket)
            crashes = Kills(scene(Path(folder), patch), server, bucket, MOMENTS)
        else:
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
                crashes.try_case(crashes.cases[number])  # type: ignore[arg-type]
            except BaseException:
                save(number)
                raise
        save(len(crashes.cases))
        print(
            f"{crashes.title}, {len(crashes.cases)} cases, {done['seconds']:.0f} s: "
            f"{json.dumps(done['counts'])}",
            flush=True,
        )


def digest_of_code() -> str:
    """The digest of the library and of the scenes: counts of other code say nothing."""
    files = [*ROOT.glob("streammega/**/*.py"), *ROOT.glob("tests/support/crash_*.py")]
    return hashlib.sha256(b"".join(file.read_bytes() for file in sorted(files))).hexdigest()


if __name__ == "__main__":
    main()
