"""What an installation without a checkout can do: write data, verify, load, resume, convert, train.

`make wheel` runs it where the wheel alone is installed. A use whose extra is not installed must be
refused by a message that names the extra.

python -P tools/smoke.py
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
from contextlib import redirect_stderr
from pathlib import Path
from typing import Any

import numpy as np

import streammega as sm
from streammega.cli.main import main as streammega

CHECKOUT = Path(__file__).resolve().parents[1]
RUN = """\
[data]
blend = ["web"]
sequence_length = 16
[model]
vocab_size = 1000
dim = 16
layers = 1
heads = 2
[train]
train_iters = 2
micro_batch_size = 2
global_batch_size = 4
device = "cpu"
out_dir = "run"
"""
WITHOUT_EXTRA = {
    "pyarrow": (
        ("convert rows.parquet out --tokenizer bytes", "convert"),
        ("convert texts.jsonl out --tokenizer bytes --provenance", "convert"),
        ("trace run.toml --find texts.jsonl:1", "convert"),
        ("trace run.toml --step 1", "convert"),
    ),
    "tokenizers": (("convert texts.jsonl out --tokenizer tokenizer.json", "convert"),),
    "sentencepiece": (("convert texts.jsonl out --tokenizer spm.model", "convert"),),
    "tiktoken": (("convert texts.jsonl out --tokenizer tiktoken:gpt2", "convert"),),
    "matplotlib": (("plot run", "plot"),),
    "safetensors": (("export run/checkpoints/step-1 model.safetensors", "export"),),
    "ray": (("convert texts.jsonl out --tokenizer bytes --backend ray", "ray"),),
}
"""By package: commands that need it, and the extra that brings it."""


def printed(words: str) -> str:
    """What a command of streammega prints. Raises SystemExit if it fails."""
    command = [sys.executable, "-P", "-m", "streammega", *words.split()]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    if ended.returncode:
        sys.exit(f"streammega {words}: exit code {ended.returncode}\n{ended.stderr}")
    return ended.stdout


def write_and_load() -> None:
    """Write a dataset, read it, and go on from a saved state."""
    rng = np.random.default_rng(1)
    with sm.IndexedDatasetWriter("web", np.uint16) as writer:
        for _ in range(200):
            writer.add_document(rng.integers(0, 1000, 50), [50])
    data = sm.DataConfig(blend=["web"], sequence_length=16, seed=1)
    sizes: dict[str, Any] = {"micro_batch_size": 2, "global_batch_size": 4}
    with sm.StreamLoader(data, **sizes) as loader:
        batches = iter(loader)
        next(batches), next(batches)
        state = json.dumps(loader.state_dict())
        expected = [next(batches)["tokens"] for _ in range(4)]
    with sm.StreamLoader(data, **sizes) as loader:
        loader.load_state_dict(json.loads(state))
        batches = iter(loader)
        assert all(bool((next(batches)["tokens"] == tokens).all()) for tokens in expected)


def main() -> None:
    package = Path(sm.__file__).parent
    assert package.parent != CHECKOUT, "streammega is not installed; this is the checkout"
    assert (package / "py.typed").exists()
    assert importlib.metadata.version("streammega") == sm.__version__
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        os.environ["XDG_CACHE_HOME"] = folder
        write_and_load()
        Path("texts.jsonl").write_text('{"text": "one"}\n{"text": "two"}\n')
        Path("run.toml").write_text(RUN)
        assert printed("--version").strip() == f"streammega {sm.__version__}"
        assert "convert" in printed("--help")
        printed("verify web")
        printed("convert texts.jsonl small --tokenizer bytes")
        assert json.loads(printed("describe small --json"))["documents"] == 2
        printed("train run.toml")
        assert printed("trace run.toml --step 1")
        refused = try_without_extras()
    print(f"streammega {sm.__version__} works; {refused} uses name the extra that they need")


def try_without_extras() -> int:
    """Try uses of packages that are not installed; returns how many."""
    Path("rows.parquet").write_bytes(b"PAR1")
    Path("web.origins").write_bytes(b"PAR1")
    count = 0
    for package, uses in WITHOUT_EXTRA.items():
        if importlib.util.find_spec(package) is not None:
            continue
        for words, extra in uses:
            with redirect_stderr(io.StringIO()) as errors:
                code = streammega(words.split())
            wanted = f"pip install 'streammega[{extra}]'"
            if code != 1 or wanted not in errors.getvalue().strip().rpartition("\n")[2]:
                sys.exit(f"streammega {words}: no message with {wanted}:\n{errors.getvalue()}")
            count += 1
    return count


if __name__ == "__main__":
    main()
