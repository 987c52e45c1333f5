"""Fuzz what reads input from outside: `make fuzz`, or

python tools/fuzz/run.py [--target NAME ...] [--seconds N] [--folder FOLDER]

Each target (tools/fuzz/targets.py) runs in a process of its own, under Atheris, whose mutations go on
from inputs that reach new code. Address space is limited, and so is the time of one input. A finding is
any error that is not the library's own, a failed comparison, too much memory, a hang or a crash: its
input and traceback are kept in FOLDER/TARGET/findings. Corpora and counts are kept too: the next call
goes on.

--replay runs the inputs of tests/support/data/fuzz, without Atheris; --keep chooses them from FOLDER.
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import io
import json
import mmap
import os
import random
import re
import resource
import shutil
import signal
import sys
import tempfile
import time
import traceback
import zipfile
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:  # it imports the library, which is to be instrumented first
    from tools.fuzz.common import Target

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
CORPUS = ROOT / "tests" / "support" / "data" / "fuzz"
"""A .zip of each target: inputs that reach all code which was reached, with those of findings."""
MEMORY_BYTES = 1 << 30
"""Address space that inputs may take beyond what the process had before."""
INPUT_SECONDS = 10
PROCESS_SECONDS = 60
"""Atheris loses a little memory with each comparison of some values: the limit would be reached."""
ENVIRONMENT = {
    "ARROW_DEFAULT_MEMORY_POOL": "system",  # others reserve a GiB ahead
    "CUDA_VISIBLE_DEVICES": "",
    "MALLOC_ARENA_MAX": "2",
    "OMP_NUM_THREADS": "1",
    "PYTHONHASHSEED": "0",
    "RUST_BACKTRACE": "0",  # of panics, which are errors of ours
}
"""With these, a process takes about the address space that it uses."""
MAX_INPUT_BYTES = 1 << 20
KEPT_INPUT_BYTES = 4096
KEPT_SECONDS = 0.1
KEPT_BYTES = 8 << 10
"""Compressed bytes of a target's committed corpus, about."""
ENTRY_BYTES = 84
"""Bytes that a .zip takes for an entry of it."""
_PROGRESS = re.compile(rb"cov: (\d+) ft: \d+ corp: (\d+)")


Targets = dict[str, Callable[[Path], "Target"]]


class Counts(NamedTuple):
    """What was done for a target so far, over all calls."""

    inputs: int = 0
    seconds: float = 0.0
    coverage: int = 0
    corpus: int = 0


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--target", action="append", help="a target; all, if none is named")
    parser.add_argument("--seconds", type=int, default=20, help="seconds of each target")
    parser.add_argument("--folder", type=Path, default=ROOT / "fuzz-run", help="what is kept")
    parser.add_argument("--list", action="store_true", help="print the table of counts alone")
    parser.add_argument("--replay", action="store_true", help="run the committed corpora")
    parser.add_argument("--keep", action="store_true", help="write the corpora to commit")
    args = parser.parse_args()
    if not ENVIRONMENT.items() <= os.environ.items():  # some count from the start of a process
        os.execve(sys.executable, [sys.executable, *sys.argv], os.environ | ENVIRONMENT)
    targets = load_targets(instrumented=not (args.list or args.replay or args.keep))
    names = args.target or list(targets)
    if unknown := set(names) - set(targets):
        parser.error(f"no target {', '.join(sorted(unknown))}; there are {', '.join(targets)}")
    if args.replay:
        return replay(names, targets)
    for name in names:
        if args.keep:
            keep(name, targets, args.folder / name)
        elif not args.list:
            campaign(name, targets, args.folder / name, args.seconds)
    return print_table(names, args.folder)


def load_targets(*, instrumented: bool) -> Targets:
    """All targets. Their code notes what is reached, if it is instrumented: importing then takes longer,
    so it is done once, and each target runs in a fork.
    """
    if not instrumented:
        from tools.fuzz.targets import TARGETS

        return TARGETS
    try:
        import atheris
    except ImportError:
        sys.exit("Atheris is not installed: use `make fuzz`, or pip install -e '.[fuzz]'")

    kernels = [f"streammega.kernels.{path.stem}" for path in ROOT.glob("streammega/kernels/*.py")]
    quiet = contextlib.redirect_stderr(io.StringIO())  # it names each module
    with (
        quiet,
        atheris.instrument_imports(
            include=["streammega", "dacite", "tarfile", "tomllib", "zipfile"],
            exclude=kernels,  # numba compiles them from their bytecode
        ),
    ):
        from tools.fuzz.targets import TARGETS

        return TARGETS


# --- campaigns ------------------------------------------------------------------------------------


def campaign(name: str, targets: Targets, folder: Path, seconds: int) -> None:
    """Fuzz a target for so long. A crash or a hang ends a process, and so does time: another one goes
    on.
    """
    (folder / "findings").mkdir(parents=True, exist_ok=True)
    (folder / "corpus").mkdir(exist_ok=True)
    until = time.monotonic() + seconds
    while (left := int(until - time.monotonic())) > 0:
        seconds_here = min(left, PROCESS_SECONDS)
        call = partial(fuzz_here, name, targets, folder, seconds_here)
        status = in_fork(call, folder / "log", seconds_here + 6 * INPUT_SECONDS)
        match = _PROGRESS.findall((folder / "log").read_bytes())
        if match:
            coverage, corpus = map(int, match[-1])
            counts = read_counts(folder)
            save_counts(folder, counts._replace(coverage=coverage, corpus=corpus))
        if status == 0:
            continue
        print(f"{name}: the process ended with {status}; see {folder / 'log'}", flush=True)
        if not match:
            break
        if status < 0 or status == 1:  # libFuzzer did not come to write the input
            data = (folder / "current").read_bytes()
            size = int.from_bytes(data[:8], "little")
            path = folder / "findings" / f"ended-with{status}.input"
            path.write_bytes(data[8 : 8 + size])
            shutil.copy(folder / "log", path.with_suffix(".txt"))


def in_fork(call: Callable[[], None], log: Path, seconds: float) -> int:
    """Make a call in a fork, whose output goes to a file; its exit code. It is killed after so long,
    when it has said where it hangs: libFuzzer's own alarm may wait for a lock of what hangs.
    """
    sys.stdout.flush()
    child = os.fork()
    if not child:
        output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(output, 1)
        os.dup2(output, 2)
        faulthandler.register(signal.SIGUSR1)
        try:
            call()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    until = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(child, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > until:
            os.kill(child, signal.SIGUSR1)
            time.sleep(1)
            os.kill(child, signal.SIGKILL)
        time.sleep(0.2)


def print_table(names: list[str], folder: Path) -> int:
    """The counts of all targets; 1 where there are findings."""
    print(
        f"{'target':16} {'inputs':>12} {'seconds':>8} {'coverage':>9} {'corpus':>7} {'findings':>9}"
    )
    findings = 0
    for name in names:
        counts = read_counts(folder / name)
        found = len(inputs_of_findings(folder / name))
        findings += found
        print(
            f"{name:16} {counts.inputs:>12,} {counts.seconds:>8,.0f} {counts.coverage:>9,} "
            f"{counts.corpus:>7,} {found:>9}"
        )
    return 1 if findings else 0


def inputs_of_findings(folder: Path) -> list[Path]:
    """What ended a process has the name that libFuzzer gives it: crash-..., timeout-..."""
    return sorted(path for path in (folder / "findings").glob("*") if path.suffix != ".txt")


def read_counts(folder: Path) -> Counts:
    try:
        return Counts(**json.loads((folder / "counts.json").read_text()))
    except FileNotFoundError:
        return Counts()


def save_counts(folder: Path, counts: Counts) -> None:
    (folder / "counts.new").write_text(json.dumps(counts._asdict()))
    (folder / "counts.new").rename(folder / "counts.json")


# --- one process ----------------------------------------------------------------------------------


def fuzz_here(name: str, targets: Targets, folder: Path, seconds: int) -> None:
    """Fuzz a target in this process, which Atheris ends."""
    import atheris

    with tempfile.TemporaryDirectory(dir=fast_folder()) as scratch:
        target = targets[name](Path(scratch))
        write_seeds(name, target.seeds, folder / "corpus")
        test = Test(target, folder)
        limit_memory()
        flags = [
            f"-timeout={INPUT_SECONDS}",
            "-rss_limit_mb=0",
            f"-artifact_prefix={folder}/findings/",
            f"-max_total_time={seconds}",
            "-print_final_stats=1",
            # the time of an input rises with its length
            f"-max_len={max(1024, 2 * max(map(len, target.seeds)))}",
            "-len_control=20",
        ]
        mutator = {"custom_mutator": mutate_json} if target.is_json else {}
        atheris.Setup([sys.argv[0], *flags, str(folder / "corpus")], test, **mutator)
        atheris.Fuzz()


class Test:
    """Runs a target, notes findings, and counts."""

    def __init__(self, target: Target, folder: Path) -> None:
        self._target = target
        self._folder = folder
        with open(folder / "current", "w+b") as file:
            file.truncate(MAX_INPUT_BYTES)
            self._current = mmap.mmap(file.fileno(), MAX_INPUT_BYTES)
            """The size of an input, and its bytes: they stay when it ends the process."""
        self._before = read_counts(folder)
        self._inputs = 0
        self._began = self._saved = time.monotonic()

    def __call__(self, data: bytes) -> None:
        self._inputs += 1
        self._current[: 8 + len(data)] = len(data).to_bytes(8, "little") + data
        error = finding(self._target, data)
        if error is not None:
            self._note(error, data)
        now = time.monotonic()
        if now - self._saved > 1:
            self._saved = now
            counts = self._before._replace(
                inputs=self._before.inputs + self._inputs,
                seconds=self._before.seconds + now - self._began,
            )
            save_counts(self._folder, counts)

    def _note(self, error: BaseException, data: bytes) -> None:
        """Keep an input of each finding, the shortest one."""
        path = self._folder / "findings" / f"{name_of(error)}.input"
        if not path.exists() or len(data) < path.stat().st_size:
            path.write_bytes(data)
            path.with_suffix(".txt").write_text("".join(traceback.format_exception(error)))


def finding(target: Target, data: bytes) -> BaseException | None:
    """The error of an input, unless it is one that the library may raise."""
    from streammega.errors import StreammegaError

    try:
        target.run(data)
    except StreammegaError as error:
        # A library's error may hide that memory was not enough, or the stack.
        cause: BaseException | None = error
        while cause is not None and not target.may_lack_memory:
            if isinstance(cause, MemoryError) or "MemoryError" in str(cause):
                return error
            cause = cause.__cause__ or cause.__context__
    except Exception as error:
        return error
    return None


def name_of(error: BaseException) -> str:
    """The same for the same fault: the error, and the last place in our code that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    ours = [
        frame for frame in frames if ROOT / "streammega" in Path(frame.filename).parents
    ] or list(frames)
    return f"{type(error).__name__}-{Path(ours[-1].filename).stem}-{ours[-1].lineno}"


def limit_memory() -> None:
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    limit = pages * resource.getpagesize() + MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (limit, limit))


def fast_folder() -> str | None:
    """A folder in memory, where there is one: inputs are files."""
    return "/dev/shm" if os.access("/dev/shm", os.W_OK) else None


def write_seeds(name: str, seeds: list[bytes], folder: Path) -> None:
    for number, data in enumerate(seeds):
        (folder / f"seed-{number}").write_bytes(data)
    for number, data in enumerate(committed(name)):
        (folder / f"kept-{number}").write_bytes(data)


def mutate_json(data: bytes, max_size: int, seed: int) -> bytes:
    """Half of the time a mutation of bytes, else one of a value in the JSON (a line of it)."""
    import atheris

    draw = random.Random(seed)
    lines = data.split(b"\n") if draw.random() < 0.5 else [data]
    number = draw.randrange(len(lines))
    try:
        value = json.loads(lines[number])
    except (ValueError, RecursionError):
        value = None
    if value is None or draw.random() < 0.5:
        return bytes(atheris.Mutate(data, max_size))
    lines[number] = json.dumps(with_change(value, draw)).encode()
    mutated = b"\n".join(lines)
    return mutated if len(mutated) <= max_size else bytes(atheris.Mutate(data, max_size))


ODD_VALUES: list[Any] = [
    *(None, True, False, 0, -1, 1, 2, 255, 2**31, 2**63, 2**64, -(2**63), 10**30),
    *(0.5, -0.0, float("inf"), float("nan"), 1e308, "", "..", "a/b", "/", "\0", "\ud800", "é", "1"),
    *([], {}, [[]], [None], {"": None}, "x" * 200, [0] * 50),
]


def with_change(value: Any, draw: random.Random) -> Any:
    """A JSON value with one change somewhere in it."""
    if isinstance(value, dict) and value and draw.random() < 0.85:
        key = draw.choice(list(value))
        change = draw.random()
        if change < 0.15:
            return {name: item for name, item in value.items() if name != key}
        if change < 0.25:
            return {**value, draw.choice([key + "x", "text", "", "tools"]): draw.choice(ODD_VALUES)}
        return {**value, key: with_change(value[key], draw)}
    if isinstance(value, list) and value and draw.random() < 0.85:
        place = draw.randrange(len(value))
        change = draw.random()
        if change < 0.15:
            return value[:place] + value[place + 1 :]
        if change < 0.3:
            return [*value, value[place]]
        return [*value[:place], with_change(value[place], draw), *value[place + 1 :]]
    if isinstance(value, int) and draw.random() < 0.5:
        return value + draw.choice([-1, 1, 256])
    return draw.choice(ODD_VALUES)


# --- the committed corpora ------------------------------------------------------------------------


def committed(name: str) -> Iterator[bytes]:
    """The committed inputs of a target."""
    path = CORPUS / f"{name}.zip"
    if path.exists():
        with zipfile.ZipFile(path) as archive:
            yield from map(archive.read, archive.namelist())


def keep(name: str, targets: Targets, home: Path) -> None:
    """Write the corpus to commit: findings, and then what reached new code, the shortest inputs first.
    Slow ones are left out: drivers pause after some answers.
    """
    new = [path for path in (home / "corpus").iterdir() if not path.name.startswith("seed")]
    by_size = sorted((path.read_bytes() for path in new), key=lambda data: (len(data), data))
    chosen = [path.read_bytes() for path in inputs_of_findings(home)] + by_size
    CORPUS.mkdir(parents=True, exist_ok=True)
    kept_bytes = 0
    with (
        tempfile.TemporaryDirectory(dir=fast_folder()) as scratch,
        zipfile.ZipFile(CORPUS / f"{name}.zip", "w", zipfile.ZIP_DEFLATED) as archive,
    ):
        target = targets[name](Path(scratch))
        for number, data in enumerate(dict.fromkeys(chosen)):
            kept_bytes += len(zlib.compress(data)) + ENTRY_BYTES
            began = time.monotonic()
            finding(target, data)
            is_slow = time.monotonic() - began > KEPT_SECONDS
            if not is_slow and len(data) <= KEPT_INPUT_BYTES and kept_bytes < KEPT_BYTES:
                archive.writestr(zipfile.ZipInfo(f"{number:03d}"), data, zipfile.ZIP_DEFLATED)


def replay(names: list[str], targets: Targets) -> int:
    """Run seeds and committed inputs; 1 where one is a finding."""
    failed = 0
    limit_memory()
    for name in names:
        with tempfile.TemporaryDirectory(dir=fast_folder()) as scratch:
            target = targets[name](Path(scratch))
            inputs = [*target.seeds, *committed(name)]
            for data in inputs:
                error = finding(target, data)
                if error is not None:
                    failed += 1
                    print(f"{name}: {name_of(error)} of {data!r}\n")
                    traceback.print_exception(error)
    print(f"{len(names)} targets: {failed} findings")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
