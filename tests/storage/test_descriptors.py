"""Open files: the limit is named where it is reached."""

from __future__ import annotations

from pathlib import Path

import pytest

from streammega.storage.fd_limit import explain_fd_limit
from tests.support.processes import run_python
from tools.bench.object_server import running

EXHAUSTED = """
import os, resource, sys
from streammega import StorageConfig
from streammega.errors import StorageError
from streammega.storage import open_store
endpoint, transport, built, local = sys.argv[1:]
storage = StorageConfig(
    transport=transport, storage_options={"anon": True, "endpoint_url": endpoint},
    request_timeout=5,
).tuned(max_retries=0, read_timeout=2)
first, key = open_store("s3://data/k", storage)
assert len(first.read(key, [(0, 10)])[0]) == 10  # all that is imported late is there
other = open_store("s3://data/k", StorageConfig(
    transport=transport, storage_options={"anon": True, "endpoint_url": endpoint},
    request_timeout=5,
).tuned(max_retries=0, read_timeout=3))
if built == "True":
    getattr(other[0], "inner", other[0])._client()  # so that the connection is what fails
resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
held = []
try:
    while True:
        held.append(os.open(os.devnull, os.O_RDONLY))
except OSError:
    pass
found = []
for store, key in (other, open_store(local, storage)):
    try:
        store.read(key, [(0, 10)])
        found.append("")
    except Exception as error:
        found.append(f"{type(error).__name__}: {error}")
for number in held:
    os.close(number)
print(chr(10).join(found))
"""


@pytest.mark.guarantee("holds-descriptor-object")
@pytest.mark.parametrize(
    ("transport", "built"), [("obstore", False), ("obstore", True), ("fsspec", False)]
)
def test_too_many_open_files_are_blamed_on_the_limit_and_not_on_the_network(
    tmp_path: Path, transport: str, built: bool
) -> None:
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "k").write_bytes(bytes(1000))
    with running(tmp_path) as server:
        remote, local = run_python(
            EXHAUSTED, server.endpoint, transport, str(built), str(tmp_path / "data" / "k")
        ).splitlines()
    for message in (remote, local):
        assert "too many open files: " in message
        assert " of 64; raise `ulimit -n`" in message
        assert "check endpoint_url" not in message


def test_an_error_behind_an_error_is_found_and_others_are_not_blamed() -> None:
    error = RuntimeError("could not connect")
    error.__context__ = OSError(24, "Too many open files")
    assert "ulimit -n" in explain_fd_limit(error)
    assert explain_fd_limit(RuntimeError("tcp connect error: Too many open files (os error 24)"))
    assert not explain_fd_limit(ConnectionRefusedError(111, "Connection refused"))
