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
from streammega.convert.write.records import load_json, save_json
from streammega.errors import AccessDeniedError, ObjectChangedError, StorageError
from streammega.errors.redaction import redact_urls
from streammega.storage import join_url, open_store, save_bytes
from streammega.storage.object_ops import delete, read_whole
from streammega.storage.open import is_remote
from streammega.storage.store import create_object

log = logging.getLogger(__name__)

SOMEBODY = {"job": "unknown"}
"""What is taken for the claim where it cannot be read: no conversion has such a digest."""
LOOKS = 5
BETWEEN_LOOKS = 0.1
"""Seconds: a claim that cannot be read is looked at again, so often. Tasks of one conversion claim it
at once, and where a server knows no conditions they write it over each other.
"""


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
        stored = self._read()
        if stored is not None and stored["job"] == self._job:
            return True
        if stored is not None and not self._is_free(stored):
            return False
        # Noted first, so that after a kill the claim is known for one of this work folder.
        save_json(self._note_url, {"jobs": [*self._jobs_noted(), self._job]}, self._storage)
        own_claim = {
            "job": self._job,
            "host": socket.gethostname(),
            "began": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        }
        data = json.dumps(own_claim).encode()
        if stored is None:
            store, key = open_store(self._url, self._storage)
            create_object(store, key, data)
        else:
            save_bytes(self._url, data, self._storage)
        # Another may have been first, or last where the server knows no conditions.
        stored = self._read()
        return stored is not None and stored["job"] == self._job

    def refusal(self) -> str | None:
        """Why the names cannot be claimed: a message; None if they can."""
        stored = self._read()
        if stored is None or stored["job"] == self._job or self._is_free(stored):
            return None
        place = redact_urls(self._prefix)
        return (
            f"{place}: another conversion, of other inputs or options, writes there (begun on "
            f"{stored.get('host')}, {stored.get('began')}); wait for it, or choose another output. "
            f"If it was killed: 'streammega gc {place} --remove' removes what it left; or pass "
            f"--overwrite, which writes beside it"
        )

    def release(self) -> None:
        """Give the names back, if they are held.

        What fails is told and no error: the conversion has ended, well or not.
        """
        try:
            stored = self._read()
            if stored is None or stored["job"] != self._job:
                return
            try:
                delete(self._url, self._storage)
            except AccessDeniedError:
                # Who may not delete can still write that it is held no more.
                save_bytes(self._url, b'{"job": ""}', self._storage)
        except StorageError as error:
            log.warning(
                "%s: was left there (%s); streammega gc removes it", redact_urls(self._url), error
            )

    @property
    def _note_url(self) -> str:
        return join_url(self._work, "claim.json")

    def _is_free(self, stored: dict[str, Any]) -> bool:
        """Whether it was given back, or is that of a conversion which was here, in this work
        folder, and runs no more.
        """
        if not stored["job"]:
            return True
        # A work folder in a bucket has no lock: what is noted there may be of one that is running.
        return not is_remote(self._work) and stored["job"] in self._jobs_noted()

    def _jobs_noted(self) -> list[str]:
        noted = load_json(self._note_url, self._storage) or {}
        return list(noted.get("jobs", []))

    def _read(self) -> dict[str, Any] | None:
        """What the claim says, None: there is none; one that cannot be read is somebody's."""
        for _ in range(LOOKS):
            try:
                data = read_whole(self._url, self._storage)
            except ObjectChangedError:
                data = b""
            if data is None:
                return None
            stored = _parsed(data)
            if stored is not None:
                return stored
            time.sleep(BETWEEN_LOOKS)
        return SOMEBODY


def _parsed(data: bytes) -> dict[str, Any] | None:
    """A claim from its bytes; None where they are none."""
    try:
        stored = json.loads(data)
    except ValueError:
        return None
    if not isinstance(stored, dict) or not isinstance(stored.get("job"), str):
        return None
    return stored
