"""The tokenizer of a process: loaded once, shared by all units that its threads work on."""

from __future__ import annotations

import socket
import threading
from weakref import WeakValueDictionary

from streammega.convert.job import Job
from streammega.convert.options import ConvertOptions
from streammega.convert.tokenize.encode import BatchEncoder
from streammega.convert.tokenize.tokenizers import Tokenizer, load_tokenizer
from streammega.errors import ConvertError

_encoders: dict[tuple[str, str], BatchEncoder] = {}
# Held while a tokenizer is loaded: threads that begin together wait for it, rather than load four.
_encoders_lock = threading.Lock()
_loaded: WeakValueDictionary[tuple[str, ...], Tokenizer] = WeakValueDictionary()
"""Those that conversions of this process have loaded to begin with, as long as they hold them."""


def share_tokenizer(tokenizer: Tokenizer, options: ConvertOptions) -> None:
    """Have the encoder of this process use a tokenizer that was loaded with these options: a large
    vocabulary takes a second to load, and a hundred MB.
    """
    _loaded[_key_of_tokenizer(tokenizer.digest, options)] = tokenizer


def _key_of_tokenizer(digest: str, options: ConvertOptions) -> tuple[str, ...]:
    settings = [f"{name}={value}" for name, value in options.tokenizer_settings.items()]
    return digest, str(options.tokenizer), *settings


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
    tokenizer = _loaded.get(_key_of_tokenizer(job.tokenizer_digest, job.options))
    if tokenizer is None:
        tokenizer = load_tokenizer(name, **job.options.tokenizer_settings)
    # Its tokens would be stored under the name of the other.
    if tokenizer.digest != job.tokenizer_digest:
        raise ConvertError(
            f"{name}: is another tokenizer on {socket.gethostname()} than where the conversion was "
            f"started, or was changed meanwhile; put the same one on all machines, and run the same "
            f"command again"
        )
    return BatchEncoder(tokenizer, job.options, job.input_storage)
