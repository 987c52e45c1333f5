"""Megatron's own tests of its dataset builder, with our class in place of its GPTDataset.

The wheels of megatron-core hold no tests: name a checkout of Megatron-LM by MEGATRON_LM.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import warnings
from pathlib import Path

import pytest

CHECKOUT = os.environ.get("MEGATRON_LM")
if not CHECKOUT:
    pytest.skip("name a checkout of Megatron-LM by MEGATRON_LM", allow_module_level=True)
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.training.training", reason="needs megatron-core 0.17 or newer")

ROOT = Path(__file__).parents[2]
BUILDER_TESTS = "tests/unit_tests/data/test_builder.py"
NEEDED = (
    "tests/__init__.py",
    "tests/unit_tests/__init__.py",
    "tests/unit_tests/test_utilities.py",
    "tests/unit_tests/dist_checkpointing",
    "tests/unit_tests/data/__init__.py",
    BUILDER_TESTS,
    "tools",
)
TESTS = [f"{BUILDER_TESTS}::{name}" for name in ("test_builder", "test_fast_builder")]
"""Those that build a GPTDataset. Others of the file are of Megatron's writer, and of a newer one than
the package's; test_gpt_dataset.py is of its mock data, test_prepare_cache.py of its own cache files.
"""
LEAST_PASSED = 140
LEAST_BUILT = 100


@pytest.mark.guarantee("streamgptdataset-gives-megatron")
@pytest.mark.soak
def test_megatrons_own_tests_of_its_builder_pass_with_our_dataset(tmp_path: Path) -> None:
    """200 or so, of the package that is installed: the checkout gives the tests alone. Those that are
    skipped skip by themselves, with Megatron's own class too.
    """
    for name in NEEDED:
        source = Path(str(CHECKOUT)) / name
        target = tmp_path / name
        target.parent.mkdir(parents=True, exist_ok=True)
        if source.is_dir():
            shutil.copytree(source, target)
        elif source.exists():
            shutil.copy(source, target)
    installed = os.environ.get("PYTHONPATH", "")
    paths = [str(tmp_path), installed, str(ROOT), str(ROOT / "tests" / "support")]
    alone = ["--noconftest", "-c", os.devnull, "-p", "no:cacheprovider", "--rootdir", str(tmp_path)]
    command = [sys.executable, "-m", "pytest", "-q", "-W", "ignore", "-p", "megatron_plugin"]
    done = subprocess.run(
        [*command, *alone, *TESTS],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(paths), "WORLD_SIZE": "1", "RANK": "0"},
        capture_output=True,
        text=True,
        timeout=1700,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= LEAST_PASSED
    assert len((tmp_path / "built.txt").read_text().splitlines()) > LEAST_BUILT
