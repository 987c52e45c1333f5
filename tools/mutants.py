"""Mutation testing of the core: which changes of its code does no test notice?

    python tools/mutants.py [--mutants 300] [--minutes 120] [--again-survivors] [--list]

cosmic-ray makes the mutants, keeps them in mutants-run/session.sqlite and applies one at a time, in a
copy of the checkout (mutants-run/tree). Each meets the tests of its room, first those that run its
line, the fastest first, until one fails or five minutes are over. A later run goes on; if a file
of the core has changed, its mutants are drawn and tried again.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import difflib
import functools
import hashlib
import importlib
import itertools
import json
import math
import multiprocessing
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import traceback
import warnings
from collections import Counter
from pathlib import Path
from typing import Any, NoReturn

import numba
import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "mutants-run"
TREE = RUN / "tree"
SESSION = RUN / "session.sqlite"
EQUIVALENT = ROOT / "tests" / "support" / "data" / "equivalent_mutants.toml"

ROOMS = {
    "order": ("streammega/order", ["tests/order", "tests/samples"]),
    "kernels": (
        "streammega/kernels",
        ["tests/kernels", "tests/convert/test_packing.py", "tests/order", "tests/samples"],
    ),
    "loading": ("streammega/loading", ["tests/loading"]),
    "gradients": ("streammega/gradients", ["tests/gradients"]),
    "checkpoints": (
        "streammega/train/checkpoints",
        [
            "tests/train/test_checkpoints.py",
            "tests/train/test_staging.py",
            "tests/train/test_job_lock.py",
            "tests/crash",
        ],
    ),
}
"""The code of each room, and its tests. Kernels and parts of the order have theirs where Megatron's
arrays are compared and where bins are packed, too.
"""
NO_MUTANTS = re.compile(
    # A number that is the same object is an accident of the interpreter, and a singleton is equal
    # to itself alone.
    r"core/ReplaceComparisonOperator_(.*_Is|.*_IsNot|Is_Eq|IsNot_NotEq)$"
)
TEXT_CALLS = {"log", "logging", "warnings"}
DESELECTED = (
    # It compares sources, and so would fail for every mutant of a kernel that others call.
    "tests/kernels/test_kernels.py::test_files_of_kernels_have_the_digests_of_those_that_they_call",
)
SECONDS = 300.0
TEST_SECONDS = 100
NO_PYTEST = 99
"""The exit code of a process in which pytest itself failed: that says nothing of a mutant."""
PRELOADED = (
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp",
    "torch.utils.data", "hypothesis.extra.numpy", "numba.core.event", "pyarrow.parquet", "s3fs",
    "obstore.store", "botocore.session", "aiobotocore.session", "tokenizers", "webdataset",
    "megatron.core", "moto.server", "psutil", "typer", "dacite", "zstandard", "oss2",
)  # fmt: skip
"""What tests import, which takes seconds: the forks that run them need not."""
SEED = "1"


def main() -> None:
    """Goes on with the mutants that are left, and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--mutants", type=int, default=300)
    parser.add_argument("--minutes", type=float, default=120.0, help="then it ends, to go on later")
    parser.add_argument("--room", choices=ROOMS, action="append", help="these alone")
    parser.add_argument("--again-survivors", action="store_true", help="with tests of today")
    parser.add_argument("--list", action="store_true", help="only print the table and survivors")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # so that tests under way are ended
    rooms = arguments.room or list(ROOMS)
    if not arguments.list:
        copy_checkout()
        os.chdir(TREE)
        draw_mutants(arguments.mutants)
        for room in rooms:
            for path in ROOMS[room][1]:
                measure_tests(path)
        with warnings.catch_warnings(action="ignore"):
            for library in PRELOADED:
                importlib.import_module(library)
        code, output = run_tests(["tests/order/test_order.py"], environment={})
        if code:
            sys.exit(f"tests fail without a mutant:\n{output}")
        ends = time.monotonic() + 60 * arguments.minutes
        items = [item for item in chosen_items() if room_of(item) in rooms]
        done = finished(again=arguments.again_survivors)
        for item in [item for item in items if item.job_id not in done]:
            if time.monotonic() > ends:
                break
            try_mutant(item)
    print_table()


def copy_checkout() -> None:
    """What git knows and does not ignore; a mutant that an ended run has left goes.

    All files get an old time: so bytecode and kernels that were compiled of a mutant, whose file is
    new, are never taken for those of the original.
    """
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"],
        cwd=ROOT, check=True, capture_output=True, text=True,
    )  # fmt: skip
    names = {name for name in listed.stdout.split("\n") if name and (ROOT / name).is_file()}
    for folder in ("streammega", "tests", "tools"):
        for file in (TREE / folder).rglob("*.py"):
            if str(file.relative_to(TREE)) not in names:
                file.unlink()
    for name in names:
        source, copy = ROOT / name, TREE / name
        copy.parent.mkdir(parents=True, exist_ok=True)
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            shutil.copyfile(source, copy)
            digest = hashlib.sha256(source.read_bytes()).digest()
            restore_time(copy, 10**9 + int.from_bytes(digest[:3], "big"))


def restore_time(file: Path, seconds: float) -> None:
    """The time of the original, which numba and Python compare with those of what they compiled."""
    os.utime(file, (seconds, seconds))


# Which mutants.


def draw_mutants(count: int) -> None:
    """Makes the session, or goes on with it: `count` places by a hash, and of each place one mutant.

    The draw is by hashes, so that a change of a file leaves the mutants of other files, and more mutants
    are added to those that were drawn.
    """
    from cosmic_ray.commands.init import _all_work_items
    from cosmic_ray.work_db import use_db

    digests = {str(file): digest_of(file) for file in core_files()}
    kept = json.loads((RUN / "files.json").read_text()) if (RUN / "files.json").exists() else {}
    if kept.get("files") == digests and kept.get("mutants") == count and SESSION.exists():
        return
    same = {name for name, digest in digests.items() if kept.get("files", {}).get(name) == digest}
    with use_db(SESSION) as db:
        results = {
            key_of(item): result
            for item, result in db.completed_work_items
            if str(item.mutations[0].module_path) in same
        }
        places: dict[Any, Any] = {}
        for item in _all_work_items(core_files(), {}):
            mutation = item.mutations[0]
            if is_of_interest(mutation):
                place = (str(mutation.module_path), mutation.start_pos)
                places[place] = min(places.get(place, item), item, key=rank_of)
        in_order = sorted(places.values(), key=lambda item: hash_of(*place_of(item)))
        drawn = list(itertools.islice(filter(can_compile, in_order), count))
        db.clear()
        db.add_work_items(drawn)
        for item in drawn:
            if key_of(item) in results:
                db.set_result(item.job_id, results[key_of(item)])
    (RUN / "files.json").write_text(json.dumps({"files": digests, "mutants": count}, indent=1))


def core_files() -> list[Path]:
    """The files that are mutated."""
    return sorted(file for code, _ in ROOMS.values() for file in Path(code).glob("*.py"))


def digest_of(file: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


def place_of(item: Any) -> tuple[Any, ...]:
    """Where a mutant changes the code."""
    mutation = item.mutations[0]
    return (str(mutation.module_path), mutation.start_pos)


def key_of(item: Any) -> tuple[Any, ...]:
    """What cosmic-ray makes a mutant from."""
    mutation = item.mutations[0]
    return (str(mutation.module_path), mutation.operator_name, mutation.occurrence)


def rank_of(item: Any) -> str:
    """The place of a mutant among those of its place."""
    return hash_of(*key_of(item))


def hash_of(*values: Any) -> str:
    """A random number that is the same in every run."""
    return hashlib.sha256(json.dumps([SEED, *values]).encode()).hexdigest()


def is_of_interest(mutation: Any) -> bool:
    """Whether a mutant could change what the code does: not annotations, messages and `__repr__`."""
    if NO_MUTANTS.match(mutation.operator_name):
        return False
    return not any(
        first <= mutation.start_pos and mutation.end_pos <= last
        for first, last in pointless_spans(mutation.module_path)
    )


def can_compile(item: Any) -> bool:
    """Whether a mutant is a program: the star before parameters is no product, for instance."""
    try:
        compile(code_of(item), "mutant", "exec")
    except SyntaxError:
        return False
    return True


def code_of(item: Any) -> str:
    """The mutated file."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    mutation = item.mutations[0]
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    return str(mutate_code(mutation.module_path.read_text(), operator, mutation.occurrence))


def diff_of(item: Any) -> str:
    """The lines that a mutant changes."""
    file = item.mutations[0].module_path
    before, after = file.read_text().split("\n"), code_of(item).split("\n")
    lines = difflib.unified_diff(before, after, f"a/{file}", f"b/{file}", n=0, lineterm="")
    return "\n".join(lines)


@functools.cache
def pointless_spans(file: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Annotations, calls of loggers, `__repr__`, the decorator that compiles a kernel, and two
    settings that only refuse calls which nobody makes.
    """
    nodes: list[Any] = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.AnnAssign():
                nodes.append(node.annotation)
            case ast.arg(annotation=ast.expr()):
                nodes.append(node.annotation)
            case ast.FunctionDef():
                nodes += [node] if node.name in ("__repr__", "__str__") else []
                nodes += [node.returns] if node.returns else []
                nodes += [name for name in node.decorator_list if ast.unparse(name) == "kernel"]
            case ast.Call(func=ast.Attribute(value=ast.Name(id=name))) if name in TEXT_CALLS:
                nodes.append(node)
            case ast.keyword(arg="strict" | "kw_only"):
                nodes.append(node)
    return [
        # cosmic-ray's place of a decorator begins with "@" and ends with the line.
        (
            (node.lineno, node.col_offset - (ast.unparse(node) == "kernel")),
            (node.end_lineno + (ast.unparse(node) == "kernel"), node.end_col_offset),
        )
        for node in nodes
    ]


def chosen_items() -> list[Any]:
    """The mutants of the session, in the order of the draw."""
    from cosmic_ray.work_db import use_db

    with use_db(SESSION) as db:
        return sorted(db.work_items, key=lambda item: hash_of(*place_of(item)))


def finished(again: bool) -> set[str]:
    """Jobs that have a result; but not, if asked so, survivors that may be killed today."""
    from cosmic_ray.work_db import use_db

    equivalent = read_equivalent()
    with use_db(SESSION) as db:
        return {
            item.job_id
            for item, result in db.completed_work_items
            if result.is_killed or not again or change_of(result.diff) in equivalent
        }


def room_of(item: Any) -> str:
    """Whose code a mutant changes."""
    folder = str(item.mutations[0].module_path.parent)
    return next(room for room, (code, _) in ROOMS.items() if code == folder)


# Which tests.


def measure_tests(path: str) -> None:
    """How long each test takes, and which lines it runs: once, without mutants."""
    measured = RUN / "tests" / (path.replace("/", ".") + ".json")
    if measured.exists():
        return
    from coverage import CoverageData

    measured.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        settings.write_text("[run]\nconcurrency = thread\n")
        data_file = Path(folder) / "data"
        code, output = run_tests(
            [path],
            "--cov=streammega", f"--cov-config={settings}", "--cov-context=test", "--cov-report=",
            environment={"COVERAGE_FILE": str(data_file), "MUTANTS_TIMES": f"{folder}/times"},
        )  # fmt: skip
        if code:
            sys.exit(f"tests fail without a mutant:\n{output}")
        data = CoverageData(str(data_file))
        data.read()
        lines: dict[str, dict[int, list[str]]] = {}
        for file in data.measured_files():
            name = os.path.relpath(file)
            lines[name] = {
                line: sorted({context.partition("|")[0] for context in contexts if context})
                for line, contexts in data.contexts_by_lineno(file).items()
            }
        times = json.loads(Path(folder, "times").read_text())
    tests = [Path(path)] if path.endswith(".py") else Path(path).glob("*.py")
    files = {str(file): digest_of(file) for file in [*core_files(), *tests]}
    measured.write_text(json.dumps({**times, "lines": lines, "files": files}))


@functools.cache
def measures_of(path: str) -> Any:
    """What measure_tests has found out."""
    return json.loads((RUN / "tests" / (path.replace("/", ".") + ".json")).read_text())


def order_of_tests(item: Any) -> dict[str, float | None]:
    """The tests of a mutant's room, each with its rank: first those that run its lines.

    None is the rank of tests that neither run them nor start processes that may. Of compiled kernels,
    of what runs at import, and of files that have changed since, this is not known.
    """
    mutation = item.mutations[0]
    ranks: dict[str, float | None] = {}
    covering: set[str] = set()
    can_be_left: set[str] = set()
    for path in ROOMS[room_of(item)][1]:
        measures = measures_of(path)
        lines = measures["lines"].get(str(mutation.module_path), {})
        for line in range(mutation.start_pos[0], mutation.end_pos[0] + 1):
            covering |= set(lines.get(str(line), []))
        ranks |= measures["seconds"]
        is_same = {
            file: Path(file).is_file() and digest_of(Path(file)) == was
            for file, was in measures["files"].items()
        }
        if is_same.get(str(mutation.module_path)):
            can_be_left |= {
                test for test in measures["seconds"] if is_same.get(test.partition("::")[0])
            } - set(measures["processes"])
    if not covering or room_of(item) == "kernels":
        can_be_left = set()
    for test, seconds in ranks.items():
        if test not in covering:
            ranks[test] = None if test in can_be_left else 1000 + (seconds or 0.0)
    return ranks


def run_tests(
    paths: list[str], *options: str, environment: dict[str, str], seconds: float = math.inf
) -> tuple[int | None, str]:
    """pytest's exit code, or None after so many seconds, and the end of what it printed.

    It runs in a fork, which has imported other libraries already, and has a session of its own: what
    it leaves is killed.
    """
    arguments = [
        "-p", "tools.mutants", "-m", "not soak", "--tb=line",
        "-W", "ignore::pytest.PytestAssertRewriteWarning",
        "--timeout", str(TEST_SECONDS), "--timeout-method", "thread", *options, *paths,
    ]  # fmt: skip
    for test in DESELECTED:
        arguments += ["--deselect", test]
    with tempfile.TemporaryFile("w+", errors="replace") as output:
        pid = os.fork()
        if not pid:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            _run_pytest(arguments, {"NUMBA_CACHE_DIR": str(RUN / "numba"), **environment})
        code: int | None = None
        ends = time.monotonic() + seconds
        try:
            while code is None and time.monotonic() < ends:
                time.sleep(0.05)
                ended, status = os.waitpid(pid, os.WNOHANG)
                code = os.waitstatus_to_exitcode(status) if ended else None
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(pid, signal.SIGKILL)
            if code is None:
                os.waitpid(pid, 0)
        output.seek(0)
        return code, output.read()[-4000:]


def _run_pytest(arguments: list[str], environment: dict[str, str]) -> NoReturn:
    tree = os.getcwd()
    sys.path.insert(0, tree)
    os.environ.update(environment, PYTHONPATH=tree, CUDA_VISIBLE_DEVICES="")
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    numba.config.reload_config()  # type: ignore[no-untyped-call]
    code = NO_PYTEST
    try:
        code = int(pytest.main(arguments))
    except BaseException:
        traceback.print_exc()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


# A plugin of pytest, `-p tools.mutants`, in the processes that run_tests starts.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """First the tests that may kill the mutant; those that nobody has measured are new."""
    if "MUTANTS_RANKS" in os.environ:
        ranks = json.loads(Path(os.environ["MUTANTS_RANKS"]).read_text())
        items[:] = [item for item in items if ranks.get(item.nodeid, 0.0) is not None]
        items.sort(key=lambda item: ranks.get(item.nodeid, 0.0))


_seconds: dict[str, float] = {}
_processes: set[str] = set()
_has_started = False


def _note_starts(event: str, _: Any) -> None:
    global _has_started
    if event in ("os.fork", "os.posix_spawn", "subprocess.Popen"):
        _has_started = True


def pytest_sessionstart() -> None:
    """Begins to look for processes that tests start."""
    if "MUTANTS_TIMES" in os.environ:
        sys.addaudithook(_note_starts)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up what a test takes, and notes whether other processes may run code for it."""
    global _has_started
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + report.duration
    if _has_started or multiprocessing.active_children():
        _processes.add(report.nodeid)
        _has_started = False


def pytest_sessionfinish() -> None:
    """Leaves what was noted to the process that asks."""
    if "MUTANTS_TIMES" in os.environ:
        noted = {"seconds": _seconds, "processes": sorted(_processes)}
        Path(os.environ["MUTANTS_TIMES"]).write_text(json.dumps(noted))


# What the tests say of a mutant.


def try_mutant(item: Any) -> None:
    """Applies a mutant, runs the tests, and keeps the result; one that is listed needs no tests."""
    from cosmic_ray.mutating import use_mutation
    from cosmic_ray.plugins import get_operator
    from cosmic_ray.work_db import use_db
    from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkResult

    mutation = item.mutations[0]
    file = mutation.module_path
    began, time_of_file = time.monotonic(), file.stat().st_mtime
    diff = diff_of(item)
    code: int | None = 0
    output = "listed as equivalent"
    if change_of(diff) not in read_equivalent():
        operator = get_operator(mutation.operator_name)(**mutation.operator_args)
        with tempfile.TemporaryDirectory() as folder:
            ranks = Path(folder) / "ranks"
            ranks.write_text(json.dumps(order_of_tests(item)))
            kernels = compiled_without(file, folder)
            environment = {"MUTANTS_RANKS": str(ranks), "NUMBA_CACHE_DIR": kernels}
            with use_mutation(file, operator, mutation.occurrence):
                tests = ROOMS[room_of(item)][1]
                code, output = run_tests(tests, "-x", environment=environment, seconds=SECONDS)
        restore_time(file, time_of_file)
        if code == NO_PYTEST:
            sys.exit(output)
    seconds = time.monotonic() - began
    outcome = TestOutcome.SURVIVED if code in (0, None) else TestOutcome.KILLED
    output = f"{seconds:.1f} s, exit {code}\n{output}"
    with use_db(SESSION) as db:
        db.set_result(item.job_id, WorkResult(WorkerOutcome.NORMAL, output, outcome, diff))
    print(f"{outcome.value:8} {seconds:5.0f} s  {file}:{mutation.start_pos[0]}", flush=True)


def compiled_without(file: Path, folder: str) -> str:
    """A cache of kernels that has none of a mutated file, nor of those that have its code inlined."""
    cache = RUN / "numba"
    if file.parent.name != "kernels":
        return str(cache)
    stale = {file.stem}
    imports = {
        kernels.stem: set(re.findall(r"streammega\.kernels\.(\w+) import", kernels.read_text()))
        for kernels in file.parent.glob("*.py")
    }
    while more := {name for name, used in imports.items() if used & stale} - stale:
        stale |= more
    ignored = shutil.ignore_patterns(*(f"{name}.*" for name in stale))
    shutil.copytree(cache, Path(folder) / "numba", ignore=ignored)
    return str(Path(folder) / "numba")


# What is printed.


def change_of(diff: str) -> tuple[str, ...]:
    """A mutant's file, and its lines before and after, without their indentation."""
    header, _, *lines = [line for line in diff.split("\n") if not line.startswith("@@")]
    changed = [
        " ".join(line[1:].strip() for line in lines if line.startswith(sign)).strip()
        for sign in "-+"
    ]
    return (header.removeprefix("--- a/"), *changed)


def read_equivalent() -> set[tuple[str, ...]]:
    """The mutants that change nothing that a program can see, each with its reason."""
    listed = tomllib.loads(EQUIVALENT.read_text())["mutant"]
    return {(mutant["file"], mutant["before"], mutant["after"]) for mutant in listed}


def print_table() -> None:
    """The counts of each room, after the survivors that nobody has explained."""
    from cosmic_ray.work_db import use_db

    equivalent = read_equivalent()
    counts: dict[str, Counter[str]] = {room: Counter() for room in ROOMS}
    with use_db(SESSION) as db:
        for item in db.work_items:
            counts[room_of(item)]["mutants"] += 1
        for item, result in db.completed_work_items:
            count = counts[room_of(item)]
            count["seconds"] += round(float(result.output.split()[0]))
            change = change_of(result.diff)
            if result.is_killed:
                count["killed"] += 1
            elif change in equivalent:
                count["equivalent"] += 1
            else:
                count["survived"] += 1
                print(
                    f"\n{change[0]}:{item.mutations[0].start_pos[0]}\n- {change[1]}\n+ {change[2]}"
                )
    print("\n| room | drawn | killed | survived | equivalent | share killed | minutes |")
    print("|---|---|---|---|---|---|---|")
    counts["all"] = sum(counts.values(), Counter())
    for room, count in counts.items():
        tried = count["killed"] + count["survived"]
        share = f"{100 * count['killed'] / tried:.1f} %" if tried else ""
        print(
            f"| `{room}` | {count['mutants']} | {count['killed']} | {count['survived']} "
            f"| {count['equivalent']} | {share} | {count['seconds'] / 60:.0f} |"
        )


if __name__ == "__main__":
    main()
