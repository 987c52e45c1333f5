"""Mutation testing of the core: which changes of its code does no test notice?

    python tools/mutants.py [--mutants 300] [--minutes 120] [--again-survivors] [--list]

cosmic-ray makes the mutants and applies one at a time, in a copy of the checkout (mutants-run/tree).
Each meets the tests of its room, first those that run its line, until one fails or five minutes are
over. Results are kept in tests/support/data/mutants.toml, so that a later run, also of another
checkout, goes on. A result belongs to the text of its line: lines that change are drawn again.
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
import warnings
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numba
import pytest

ROOT = Path(__file__).resolve().parent.parent
RUN = ROOT / "mutants-run"
TREE = RUN / "tree"
RESULTS = ROOT / "tests" / "support" / "data" / "mutants.toml"
HEADER = """\
# Mutants that `make mutants` has tried: the code before and after, and what the tests said of it.
# `equivalent` changes nothing that a program can see, for the reason that is given.
"""
SAVED = [f"tests/train/test_{name}.py" for name in ("checkpoints", "staging", "job_lock")]
PACKING = "tests/convert/test_packing.py"
SIMULATED = "tests/apps/test_simulated_reads.py"
ROOMS = {
    "order": ("streammega/order", ["tests/order", "tests/samples"]),
    "kernels": ("streammega/kernels", ["tests/kernels", PACKING, "tests/order", "tests/samples"]),
    "loading": ("streammega/loading", ["tests/loading", SIMULATED]),
    "gradients": ("streammega/gradients", ["tests/gradients"]),
    "checkpoints": ("streammega/train/checkpoints", [*SAVED, "tests/crash"]),
}
"""The code of each room, and its tests. Kernels and parts of the order have theirs where Megatron's
arrays are compared and where bins are packed, too.
"""
NO_MUTANTS = re.compile(
    r"core/(RemoveDecorator|ReplaceComparisonOperator_(.*_Is|.*_IsNot|Is_Eq|IsNot_NotEq))$"
)
"""Without the decorator a kernel is not compiled. A number that is the same object is an accident of
the interpreter, and a singleton is equal to itself alone.
"""
DESELECTED = (
    # It compares sources, and so would fail for every mutant of a kernel that others call.
    "tests/kernels/test_kernels.py::test_files_of_kernels_have_the_digests_of_those_that_they_call",
)
SECONDS = 300.0
TEST_SECONDS = 100
FIRST_TESTS = 20
"""So many tests run first, since to import the others takes seconds."""
NO_PYTEST = 99
"""The exit code of a process in which pytest itself failed: that says nothing of a mutant."""
PRELOADED = (
    "torch.distributed.checkpoint", "torch.distributed.tensor", "torch.distributed.fsdp",
    "torch.utils.data", "hypothesis.extra.numpy", "numba.core.event", "pyarrow.parquet", "s3fs",
    "obstore.store", "botocore.session", "aiobotocore.session", "tokenizers", "webdataset",
    "megatron.core", "moto.server", "psutil", "typer", "dacite", "zstandard",
)  # fmt: skip
"""What tests import, which takes seconds: the forks that run them need not."""


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
    copy_checkout()
    drawn = draw_mutants(arguments.mutants)
    if not arguments.list:
        with warnings.catch_warnings(action="ignore"):
            for library in PRELOADED:
                importlib.import_module(library)
        environment = {**os.environ, "NUMBA_CACHE_DIR": str(RUN / "numba")}
        subprocess.run([sys.executable, "-m", "streammega", "warmup"], check=True, env=environment)
        ends = time.monotonic() + 60 * arguments.minutes
        for mutant in drawn:
            room, result = room_of(mutant["file"]), read_results().get(key_of(mutant))
            again = ("survived",) if arguments.again_survivors else ()
            is_left = result is None or result["result"] in again
            if is_left and room in (arguments.room or ROOMS) and time.monotonic() < ends:
                try_mutant(mutant)
    print_table(drawn)


def copy_checkout() -> None:
    """What git knows, as it is now; a mutant that an ended run has left goes.

    All files get an old time: so bytecode and kernels that were compiled of a mutant, whose file is
    new, are never taken for those of the original.
    """

    def git(*arguments: str) -> str:
        author = ["-c", "user.name=mutants", "-c", "user.email=mutants"]
        run = subprocess.run(
            ["git", *author, *arguments], check=True, capture_output=True, text=True
        )
        return run.stdout.strip()

    os.chdir(ROOT)
    if not TREE.exists():
        git("clone", "--shared", "--no-checkout", ".", str(TREE))
    changed = git("stash", "create")
    git("-C", str(TREE), "reset", "--hard", changed or git("rev-parse", "HEAD"))
    os.chdir(TREE)
    for file in Path("streammega").rglob("*.py"):
        restore_time(file)


def restore_time(file: Path) -> None:
    """The time of the original, which numba and Python compare with those of what they compiled."""
    seconds = 10**9 + int(digest_of(file)[:6], 16)
    os.utime(file, (seconds, seconds))


def digest_of(file: Path) -> str:
    """The digest of a file."""
    return hashlib.sha256(file.read_bytes()).hexdigest()


# Which mutants.


def draw_mutants(count: int) -> list[dict[str, Any]]:
    """`count` places by a hash of their code, and of each place one mutant by a hash.

    So a change of the code leaves the mutants of other lines, and more mutants are added to those
    that were drawn.
    """
    from cosmic_ray.commands.init import _all_work_items

    files = sorted(file for code, _ in ROOMS.values() for file in Path(code).glob("*.py"))
    state = {"count": count, "files": {str(file): digest_of(file) for file in files}}
    kept = RUN / "drawn.json"
    if kept.exists() and (drawn := json.loads(kept.read_text()))["state"] == state:
        return list(drawn["mutants"])
    places: dict[str, tuple[str, Any]] = {}
    numbers: Counter[Any] = Counter()
    for item in _all_work_items(files, {}):
        mutation = item.mutations[0]
        if not is_of_interest(mutation):
            continue
        (row, column), file = mutation.start_pos, mutation.module_path
        line = lines_of(file)[row - 1]
        rows = [at for at, other in enumerate(lines_of(file), 1) if other == line]
        indent = len(line) - len(line.lstrip())
        place = hash_of(str(file), line.strip(), rows.index(row), column - indent)
        numbers[place, mutation.operator_name] += 1
        rank = hash_of(place, mutation.operator_name, numbers[place, mutation.operator_name])
        places[place] = min(
            places.get(place, (rank, mutation)), (rank, mutation), key=lambda x: x[0]
        )
    mutants = (
        mutant_of(mutation) for _, (_, mutation) in sorted(places.items(), key=lambda x: x[0])
    )
    drawn = list(itertools.islice(filter(None, mutants), count))
    kept.write_text(json.dumps({"state": state, "mutants": drawn}))
    return drawn


@functools.cache
def lines_of(file: Path) -> list[str]:
    """The lines of a file."""
    return file.read_text().split("\n")


def hash_of(*values: Any) -> str:
    """A random number that is the same in every run."""
    return hashlib.sha256(json.dumps(values).encode()).hexdigest()


def is_of_interest(mutation: Any) -> bool:
    """Whether a mutant could change what the code does: not annotations, messages and `__repr__`."""
    return not NO_MUTANTS.match(mutation.operator_name) and not any(
        first <= mutation.start_pos and mutation.end_pos <= last
        for first, last in pointless_spans(mutation.module_path)
    )


@functools.cache
def pointless_spans(file: Path) -> list[tuple[tuple[int, int], tuple[int, int]]]:
    """Annotations, calls of loggers, `__repr__`, and two settings that only refuse calls which
    nobody makes.
    """
    nodes: list[Any] = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case (
                ast.AnnAssign(annotation=annotation) | ast.arg(annotation=ast.expr() as annotation)
            ):
                nodes.append(annotation)
            case ast.FunctionDef(name="__repr__" | "__str__"):
                nodes.append(node)
            case ast.FunctionDef(returns=ast.expr() as returns):
                nodes.append(returns)
            case ast.Call(func=ast.Attribute(value=ast.Name(id="log" | "logging" | "warnings"))):
                nodes.append(node)
            case ast.keyword(arg="strict" | "kw_only"):
                nodes.append(node)
    return [((n.lineno, n.col_offset), (n.end_lineno, n.end_col_offset)) for n in nodes]


def mutant_of(mutation: Any) -> dict[str, Any] | None:
    """A mutant's lines before and after; None if it is no program: the star before parameters is no
    product, for instance.
    """
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    file = mutation.module_path
    operator = get_operator(mutation.operator_name)(**mutation.operator_args)
    code = mutate_code(file.read_text(), operator, mutation.occurrence)
    try:
        compile(code, "mutant", "exec")
    except SyntaxError:
        return None
    old, new = lines_of(file), code.split("\n")
    changes = difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes()
    first, last = changes[0][2], changes[-1][1]  # the equal lines before and after
    rows = old[first:last], new[first : len(new) - len(old) + last]
    before, after = (" ".join(map(str.strip, lines)) for lines in rows)
    places = {"line": first + 1, "last": last}
    return {"file": str(file), **places, "before": before, "after": after, "code": code}


def room_of(file: str) -> str:
    """Whose code a file is."""
    return next(room for room, (code, _) in ROOMS.items() if code == str(Path(file).parent))


# What is known of them.


def key_of(mutant: dict[str, Any]) -> tuple[str, str, str]:
    """A mutant in the table of results."""
    return (mutant["file"], mutant["before"], mutant["after"])


def read_results() -> dict[tuple[str, str, str], dict[str, Any]]:
    """What was found out of each mutant, here or elsewhere."""
    return {key_of(mutant): mutant for mutant in tomllib.loads(RESULTS.read_text())["mutant"]}


def keep_result(mutant: dict[str, Any]) -> None:
    """Writes the table of results with this one."""
    results = read_results()
    results[key_of(mutant)] = mutant
    order = sorted(results.values(), key=lambda row: (row["file"], row["line"], row["after"]))
    rows = (
        ", ".join(
            f"{name} = {json.dumps(value, ensure_ascii=False)}" for name, value in row.items()
        )
        for row in order
    )
    text = "".join(f"  {{ {row} }},\n" for row in rows)
    RESULTS.with_suffix(".new").write_text(f"{HEADER}mutant = [\n{text}]\n")
    RESULTS.with_suffix(".new").replace(RESULTS)


def print_table(drawn: list[dict[str, Any]]) -> None:
    """The counts of each room, after the survivors that nobody has explained."""
    results = read_results()
    counts: dict[str, Counter[str]] = {room: Counter() for room in ROOMS}
    for mutant in drawn:
        count, result = counts[room_of(mutant["file"])], results.get(key_of(mutant))
        count["drawn"] += 1
        if result is not None:
            count[result["result"]] += 1
            if result["result"] == "survived":
                print(
                    f"\n{mutant['file']}:{mutant['line']}\n- {mutant['before']}\n+ {mutant['after']}"
                )
    print("\n| room | drawn | killed | survived | equivalent | share killed |")
    print("|---|---|---|---|---|---|")
    counts["all"] = sum(counts.values(), Counter())
    for room, count in counts.items():
        tried = count["killed"] + count["survived"]
        share = f"{100 * count['killed'] / tried:.1f} %" if tried else ""
        print(
            f"| `{room}` | {count['drawn']} | {count['killed']} | {count['survived']} "
            f"| {count['equivalent']} | {share} |"
        )


# Which tests.


@functools.cache
def measures_of(path: str) -> dict[str, Any]:
    """How long each test of a file takes, and the lines that it runs, by their text."""
    from coverage import CoverageData

    kept = RUN / "tests" / f"{path.replace('/', '.')}-{digest_of(Path(path))[:12]}.json"
    if kept.exists():
        return dict(json.loads(kept.read_text()))
    print(f"measuring {path}", flush=True)
    kept.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        settings = Path(folder) / "coveragerc"
        settings.write_text("[run]\nconcurrency = thread\n")
        environment = {"COVERAGE_FILE": f"{folder}/data", "MUTANTS_TIMES": f"{folder}/times"}
        options = [f"--cov-config={settings}", "--cov-context=test", "--cov-report="]
        options += ["--cov=streammega", "--cov=tests"]
        _, output = run_tests([path], *options, environment=environment)
        if not Path(environment["MUTANTS_TIMES"]).exists():
            sys.exit(f"{path} cannot be run without a mutant:\n{output}")
        data = CoverageData(f"{folder}/data")
        data.read()
        lines: dict[str, dict[str, list[str]]] = {}
        for file in data.measured_files():
            text = lines_of(Path(file))
            rows = lines.setdefault(os.path.relpath(file), {})
            for row, contexts in data.contexts_by_lineno(file).items():
                tests = {context.partition("|")[0] for context in contexts if context}
                rows[text[row - 1]] = sorted(tests | set(rows.get(text[row - 1], ())))
        measures = {**json.loads(Path(folder, "times").read_text()), "lines": lines}
    kept.write_text(json.dumps(measures))
    return dict(measures)


def order_of_tests(mutant: dict[str, Any]) -> list[str]:
    """The tests of a mutant's room: first those that killed others of this file, then those that run
    its lines, the fastest first.

    Tests that neither run them nor start processes that may are left out. Of what runs at import
    alone nobody knows which those are.
    """
    file = mutant["file"]
    lines = {
        file: [line.__eq__ for line in lines_of(Path(file))[mutant["line"] - 1 : mutant["last"]]]
    }
    if room_of(file) == "kernels":
        lines = {str(user): [calls] for user, calls in callers_of(Path(file))}
    paths = sorted(str(test) for path in ROOMS[room_of(file)][1] for test in tests_in(Path(path)))
    killers = Counter(row.get("by") for row in read_results().values() if row["file"] == file)
    ranks: dict[str, tuple[bool, int, float]] = {}
    covering, others = set(), set()
    for path in paths:
        measures = measures_of(path)
        for user, are_meant in lines.items():
            for text, tests in measures["lines"].get(user, {}).items():
                if any(is_meant(text) for is_meant in are_meant):
                    covering |= set(tests)
        others |= set(measures["processes"])
        for test, seconds in measures["seconds"].items():
            if seconds < math.inf:
                ranks[test] = (test not in covering, -killers[test], seconds)
    chosen = [test for test in ranks if not covering or test in covering | others]
    return sorted(chosen, key=lambda test: ranks[test])


def tests_in(path: Path) -> Iterator[Path]:
    """The test files of a folder, or of one file."""
    yield from path.glob("test_*.py") if path.is_dir() else [path]


def kernels_with(file: Path) -> set[str]:
    """The names of files of kernels that have the code of this one inlined, and its own."""
    names = {file.stem}
    imports = {
        kernels.stem: set(re.findall(r"streammega\.kernels\.(\w+) import", kernels.read_text()))
        for kernels in file.parent.glob("*.py")
    }
    while more := {name for name, used in imports.items() if used & names} - names:
        names |= more
    return names


def callers_of(file: Path) -> Iterator[tuple[Path, Any]]:
    """The files that call kernels with the code of this one, and what finds these calls: lines of
    compiled code cannot be measured.
    """
    modules = "|".join(kernels_with(file))
    for user in [*Path("streammega").rglob("*.py"), *Path("tests").rglob("test_*.py")]:
        imported = rf"^from streammega\.kernels\.(?:{modules}) import (\([^)]*\)|.*)$"
        found = " ".join(re.findall(imported, user.read_text(), re.MULTILINE))
        if names := set(re.findall(r"\w+", found)):
            yield user, re.compile(rf"\b(?:{'|'.join(names)})\b").search


# Runs of pytest.


def run_tests(
    paths: list[str], *options: str, environment: dict[str, str], seconds: float | None = None
) -> tuple[int | None, str]:
    """pytest's exit code, or None after so many seconds, and the end of what it printed.

    It runs in a fork, which has imported other libraries already, and has a session of its own: what
    it leaves is killed.
    """
    arguments = [
        "-p", "tools.mutants", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not soak",
        "--tb=line", "-W", "ignore::pytest.PytestAssertRewriteWarning",
        "--timeout", str(TEST_SECONDS), "--timeout-method",
        "thread" if "MUTANTS_TESTS" in environment else "signal", *options, *paths,
    ]  # fmt: skip
    arguments += [f"--deselect={test}" for test in DESELECTED]
    with tempfile.TemporaryFile("w+", errors="replace") as output:

        def run() -> None:
            os.setsid()
            for stream in (1, 2):
                os.dup2(output.fileno(), stream)
            # A mutant that few random cases meet is no fault of the tests.
            own = {"NUMBA_CACHE_DIR": str(RUN / "numba"), "STREAMMEGA_EXAMPLES": "3"}
            os.environ.update({**own, **environment})
            os.environ.update(PYTHONPATH=os.getcwd(), CUDA_VISIBLE_DEVICES="")
            sys.path.insert(0, os.getcwd())
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            numba.config.reload_config()  # type: ignore[no-untyped-call]
            code = NO_PYTEST
            with contextlib.suppress(BaseException):
                code = int(pytest.main(arguments))
            sys.stdout.flush()
            os._exit(code)

        process = multiprocessing.get_context("fork").Process(target=run)
        process.start()
        try:
            process.join(seconds)
        finally:
            code = process.exitcode
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
            process.join()
        output.seek(0)
        return code, output.read()[-4000:]


def try_mutant(mutant: dict[str, Any]) -> None:
    """Applies a mutant, runs the tests, and keeps the result."""
    tests = order_of_tests(mutant)
    began, file = time.monotonic(), Path(mutant["file"])
    code: int | None = 0
    output, original = "", file.read_text()
    with tempfile.TemporaryDirectory() as folder:
        chosen, kernels = Path(folder) / "tests", RUN / "numba"
        if room_of(mutant["file"]) == "kernels":
            ignored = shutil.ignore_patterns(*(f"{name}.*" for name in kernels_with(file)))
            kernels = Path(shutil.copytree(kernels, Path(folder) / "numba", ignore=ignored))
        environment = {"MUTANTS_TESTS": str(chosen), "NUMBA_CACHE_DIR": str(kernels)}
        try:
            file.write_text(mutant["code"])
            for stage in (tests[:FIRST_TESTS], tests[FIRST_TESTS:]):
                chosen.write_text(json.dumps(stage))
                left = began + SECONDS - time.monotonic()
                if stage and code in (0, pytest.ExitCode.NO_TESTS_COLLECTED):
                    paths = sorted({test.partition("::")[0] for test in stage})
                    code, output = run_tests(paths, "-x", environment=environment, seconds=left)
        finally:
            file.write_text(original)
            restore_time(file)
    if code == NO_PYTEST:
        sys.exit(output)
    killed = code not in (0, pytest.ExitCode.NO_TESTS_COLLECTED, None)
    found = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    result: dict[str, Any] = {name: mutant[name] for name in ("file", "line", "before", "after")}
    result["result"] = "killed" if killed else "survived"
    if killed:
        result["by"] = found[1] if found else f"exit {code}"
    result["seconds"] = round(time.monotonic() - began)
    keep_result(result)
    print(f"{result['result']:8} {result['seconds']:4} s  {file}:{mutant['line']}", flush=True)


# A plugin of pytest, `-p tools.mutants`, in the processes that run_tests starts.


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The tests that may kill the mutant, in their order."""
    if "MUTANTS_TESTS" in os.environ:
        tests = json.loads(Path(os.environ["MUTANTS_TESTS"]).read_text())
        by_name = {item.nodeid: item for item in items}
        items[:] = [by_name[test] for test in tests if test in by_name]


_seconds: dict[str, float] = {}
_processes: set[str] = set()
_starts: list[str] = []


def _note_starts(event: str, _: Any) -> None:
    if event in ("os.fork", "os.posix_spawn", "subprocess.Popen"):
        _starts.append(event)


def pytest_sessionstart() -> None:
    """Begins to look for processes that tests start."""
    if "MUTANTS_TIMES" in os.environ:
        sys.addaudithook(_note_starts)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Adds up what a test takes, and notes whether other processes may run code for it."""
    # Of one that fails without a mutant nothing is learned.
    seconds = math.inf if report.failed else report.duration
    _seconds[report.nodeid] = _seconds.get(report.nodeid, 0.0) + seconds
    if _starts or multiprocessing.active_children():
        _processes.add(report.nodeid)
        _starts.clear()


def pytest_sessionfinish() -> None:
    """Leaves what was noted to the process that asks."""
    if "MUTANTS_TIMES" in os.environ:
        noted = {"seconds": _seconds, "processes": sorted(_processes)}
        Path(os.environ["MUTANTS_TIMES"]).write_text(json.dumps(noted))


if __name__ == "__main__":
    main()
