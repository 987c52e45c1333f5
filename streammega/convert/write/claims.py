"""Who writes under the names of an output in a bucket: said there, since the machines that could do
so share nothing else.

A first conversion writes its tokens under the names they keep. Two of them at once would write over
each other, and the manifest of one would speak of the tokens of the other. So the first puts an
object there that names it, and takes it away in the end; one that was killed leaves it there. The
very same conversion may go on anywhere: it writes the same bytes.
"""

from __future__ import annotations

import json
import logging
import socket
import time
from typing import Any

from streammega.config import StorageConfig
from streammega.convert.read.inputs import CLAIM
from streammega.convert.write.units import load_json, save_json
from streammega.errors import AccessDeniedError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.moves import delete, read_whole
from streammega.storage.open import is_remote
from streammega.storage.store import create_object

log = logging.getLogger(__name__)


class Claim:
    """One conversion's claim of a prefix. job: a digest of what was asked for."""

    def __init__(self, prefix: str, work: str, storage: StorageConfig, job: str) -> None:
        folder, slash, stem = prefix.rpartition("/")
        self._prefix = prefix
        self._url = f"{folder}{slash}.{stem}{CLAIM}"
        self._work = work
        self._storage = storage
        self._job = job

    def take(self) -> bool:
        """Claim the names; False if another conversion has.

        Whoever holds it may take it again. Raises StorageError.
        """
        found = self._read()
        if found is not None and found["job"] == self._job:
            return True
        if found is not None and not self._is_free(found):
            return False
        # First, so that after a kill it is known for one of this work folder.
        save_json(self._note_url, {"jobs": [*self._jobs_noted(), self._job]}, self._storage)
        data = json.dumps(
            {
                "job": self._job,
                "host": socket.gethostname(),
                "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
            }
        )
        if found is None:
            create_object(*open_store(self._url, self._storage), data.encode())
        else:
            save_bytes(self._url, data.encode(), self._storage)
        # another may have been first, or last where the server knows no conditions
        there = self._read()
        return there is not None and there["job"] == self._job

    def refusal(self) -> str | None:
        """Why the names cannot be claimed: a message; None if they can."""
        found = self._read()
        if found is None or found["job"] == self._job or self._is_free(found):
            return None
        place = redact_urls(self._prefix)
        return (
            f"{place}: another conversion, of other inputs or options, writes there (begun on {found.get('host')}, "
            f"{found.get('began')}); wait for it, or choose another output. If it was killed: 'streammega gc {place} --remove' "
            f"removes what it left; or pass --overwrite, which writes beside it"
        )

    def release(self) -> None:
        """Give the names back, if they are held.

        What fails is told and no error: the conversion has ended, well or not.
        """
        try:
            found = self._read()
            if found is None or found["job"] != self._job:
                return
            try:
                delete(self._url, self._storage)
            except AccessDeniedError:  # who may not delete can still write that it is held no more
                save_bytes(self._url, b'{"job": ""}', self._storage)
        except StorageError as error:
            log.warning(
                "%s: was left there (%s); streammega gc removes it", redact_urls(self._url), error
            )

    @property
    def _note_url(self) -> str:
        return join_url(self._work, "claim.json")

    def _is_free(self, found: dict[str, Any]) -> bool:
        """Whether it was given back, or is that of a conversion which was here, in this work
        folder, and runs no more.
        """
        if not found["job"]:
            return True
        # A work folder in a bucket has no lock: what is noted there may be of one that is running.
        return not is_remote(self._work) and found["job"] in self._jobs_noted()

    def _jobs_noted(self) -> list[str]:
        noted = load_json(self._note_url, self._storage) or {}
        return list(noted.get("jobs", []))

    def _read(self) -> dict[str, Any] | None:
        """What the claim says; one that cannot be read is somebody's."""
        data = read_whole(self._url, self._storage)
        if data is None:
            return None
        try:
            found = json.loads(data)
        except ValueError:
            found = {}
        return (
            found
            if isinstance(found, dict) and isinstance(found.get("job"), str)
            else {"job": "unknown"}
        )
