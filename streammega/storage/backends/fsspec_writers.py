"""Uploads by fsspec's drivers: nothing shows under the final name before `commit`."""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable
from typing import Any

import fsspec

from streammega.storage.parts import part_bytes

log = logging.getLogger(__name__)

Wrap = Callable[[BaseException], BaseException]
"""The streammega error for one of a driver's."""
_GLOB_SIGNS = "*?["


class RenamingWriter:
    """For drivers that publish a file when it is closed, or while it is written.

    It has another name until then, and is renamed.
    """

    def __init__(self, fs: Any, key: str, wrap: Wrap) -> None:
        self._fs = fs
        self._key = key
        self._wrap = wrap
        self._temporary = f"{key}.{uuid.uuid4().hex}.partial"
        self._file = fs.open(self._temporary, "wb")

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes."""
        try:
            self._file.write(data)
        except Exception as error:
            raise self._wrap(error) from None

    def commit(self) -> None:
        """Close, then rename."""
        try:
            self._file.close()
            _rename(self._fs, self._temporary, self._key)
        except Exception as error:
            raise self._wrap(error) from None

    def abort(self) -> None:
        """Close and remove the temporary file."""
        for step in (self._file.close, lambda: self._fs.rm_file(self._temporary)):
            try:
                step()
            except Exception:  # the writer is being thrown away: what could be removed, was
                log.debug("could not remove %s", self._temporary)


def _rename(fs: Any, old: str, new: str) -> None:
    """Move a file."""
    # fsspec's own `mv`, of drivers that have none, takes signs of globs in a name for a glob.
    own_move = type(fs).mv is not fsspec.AbstractFileSystem.mv
    if not own_move and any(sign in old for sign in _GLOB_SIGNS):
        fs.cp_file(old, new)
        fs.rm_file(old)
    else:
        fs.mv(old, new)


class FsspecWriter:
    """An s3fs file opened without autocommit: a multipart upload that is completed or aborted."""

    def __init__(self, file: Any, wrap: Wrap) -> None:
        self._file = file
        self._wrap = wrap

    def write(self, data: bytes | memoryview) -> None:
        """Append bytes, in parts that grow: s3fs sends one whenever `blocksize` bytes are there."""
        # s3fs of 2024 has no such setting.
        fixed_size = getattr(self._file.fs, "fixed_upload_size", False)
        if not fixed_size:
            parts = getattr(self._file, "parts", None) or []
            self._file.blocksize = max(self._file.blocksize, part_bytes(len(parts)))
        try:
            self._file.write(data)
        except Exception as error:
            raise self._wrap(error) from None

    def commit(self) -> None:
        """Send what is left and publish."""
        try:
            self._file.close()
            self._file.commit()
        except Exception as error:
            raise self._wrap(error) from None

    def abort(self) -> None:
        """Discard the upload, and keep the file's finaliser from publishing it."""
        try:
            self._file.discard()
        except Exception as error:
            log.debug("the upload could not be discarded: %s", type(error).__name__)
        self._file.closed = True
