"""The tokenizer of a process: loaded once, shared by all units that its threads work on."""

from __future__ import annotations

import socket
import threading

from streammega.convert.tokenize.encode import BatchEncoder
from streammega.convert.tokenize.tokenizers import load_tokenizer
from streammega.convert.write.job import Job
from streammega.errors import ConvertError

_encoders: dict[tuple[str, str], BatchEncoder] = {}
# Held while a tokenizer is loaded: threads that begin together wait for it, rather than load four.
_encoders_lock = threading.Lock()


def encoder_of(job: Job) -> BatchEncoder:
    """The encoder of this process.

    Raises ConvertError when the inputs have text and no tokenizer was given.
    """
    if job.options.tokenizer is None:
        raise ConvertError(
            "the inputs hold text, so a tokenizer is needed: --tokenizer tokenizer.json (or `bytes`)"
        )
    key = (job.tokenizer_digest, job.options.digest())
    with _encoders_lock:
        if key not in _encoders:
            # Of a former conversion in this process; it would only take memory.
            _encoders.clear()
            _encoders[key] = _load_encoder(job, job.options.tokenizer)
        return _encoders[key]


def eod_of(job: Job) -> int | None:
    """The id that ends documents; None where nothing does."""
    if job.options.tokenizer is None:
        return job.options.eod_id
    return encoder_of(job).eod


def _load_encoder(job: Job, name: str) -> BatchEncoder:
    tokenizer = load_tokenizer(name, **job.options.tokenizer_settings)
    # Its tokens would be stored under the name of the other.
    if tokenizer.digest != job.tokenizer_digest:
        raise ConvertError(
            f"{name}: is another tokenizer on {socket.gethostname()} than where the conversion was "
            f"started, or was changed meanwhile; put the same one on all machines, and run the same "
            f"command again"
        )
    return BatchEncoder(tokenizer, job.options, job.storage)
