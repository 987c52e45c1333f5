"""What a conversion is asked for: everything that its output depends on, and nothing else."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import numpy as np

from streammega.convert.digests import digest_of_json
from streammega.dataset.idx import token_dtype_named
from streammega.dataset.shards import SUFFIXES, Kind
from streammega.errors import ConfigError
from streammega.storage.seekable_zstd import FRAME_BYTES, LEVEL

MiB = 1 << 20
MOST_PACKED = 1 << 24
"""Tokens of a bin: a window of them is held in memory."""


@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How documents become tokens, which are kept, and how they are laid out."""

    tokenizer: str | None = None
    """A tokenizer.json, a folder with one, `vocab.json,merges.txt` (Megatron's GPT2BPETokenizer), a
    name on the Hugging Face hub, a SentencePiece .model, a .tiktoken file, tiktoken:NAME, or
    `bytes`; None: the inputs hold tokens.
    """
    include: tuple[str, ...] = ()
    """Of folders and globs, patterns of the files that are read (none: all): of their names, or,
    with a slash, of their paths.
    """
    exclude: tuple[str, ...] = ()
    """Of folders and globs, patterns of the files and folders that are not read."""
    hf_split: str | None = None
    """Read only inputs of this split, which names of files or folders say (`train`, `validation`,
    `test`, `train_sft`, ...); `all`: of every one. None: inputs of several splits are an error.
    """
    keys: tuple[str, ...] = ("text",)
    """Keys of a record that hold its text, or paths to them (`meta.text`), each a sequence of the
    document; `text,content` is the first of them that a record has, and `key:1` gives its tokens
    mode 1.
    """
    read_as: Literal["text", "lines", "json"] | None = None
    """How plain text and files of unknown suffix are read: each file is one text, each line is one,
    or JSON records. None: plain text is one text a file, and unknown suffixes are refused.
    """
    member: str | None = None
    """Of WebDataset samples with several members, the one that is the document (`txt`); a pattern
    takes all that match it.
    """
    chat: bool = False
    """Records hold `messages`: headers and questions get mode 0, answers of the
    assistant mode 1.
    """
    chat_template: str | None = None
    """How messages are written: `tokenizer` (its own chat template; `tokenizer:NAME`), `chatml`,
    `llama3`, or a file; answers of the assistant get mode 1, all else 0. None: `<|role|>`, a
    newline, the text and the end-of-document token.
    """
    template_vars: dict[str, Any] = field(default_factory=dict)
    """Variables of the chat template, as transformers' apply_chat_template passes them
    (`enable_thinking`). `strftime_now` is the day that a template writes, YYYY-MM-DD.
    """
    append_eod: bool = True
    """End every document with the end-of-document token."""
    eod: str | None = None
    """The end-of-document token; None: found by its usual names."""
    eod_id: int | None = None
    """For inputs of tokens: the id that ends documents."""
    split_sentences: str | None = None
    """A language code, such as `en`: every sentence is a sequence of its document."""
    input_dtype: str | None = None
    """Of raw token arrays without a header; None: uint16, unless they look like 32-bit ids, which
    is an error.
    """
    keep_empty: bool = False
    """Keep texts without a single token, empty ones and nulls too, as documents of an end alone;
    Megatron's datasets hold no sequence of them, and so do these by default.
    """
    special_tokens: Literal["parse", "text"] | None = None
    """What a special token that is spelt in a text becomes: its id, or text like any other. None:
    as the tokenizer's library does, which is `parse` for Hugging Face (Megatron too) and `text` for
    tiktoken.
    """
    bos: str | None = None
    """A token that begins every document."""
    add_special_tokens: bool = False
    """Let the post-processor of a tokenizer.json add what it adds to every text."""
    tiktoken_pattern: str | None = None
    """How a .tiktoken file cuts text: gpt2, p50k_base, cl100k_base, o200k_base, llama3, qwen, or a
    regular expression; None: by the number of its tokens, where that is one of these.
    """
    dtype: str | None = None
    """Of the output; None: that of the tokens."""
    min_tokens: int = 0
    """Documents with fewer tokens are dropped."""
    max_tokens: int | None = None
    """Documents with more are treated as `long` says."""
    long: Literal["cut", "drop"] = "cut"
    """Longer documents keep their first tokens and, in the last place, the end-of-document token;
    or they are dropped.
    """
    pack: int | None = None
    """Put documents into bins of so many tokens, of which none is cut: samples of that length in
    training; None: documents lie end to end.
    """
    pack_long: Literal["split", "drop"] = "split"
    """Documents longer than a bin become several of its length and one of the rest; or they are
    dropped.
    """
    max_documents: int | None = None
    """Documents of a bin, at most; None: as many as fit."""
    modes: tuple[int, ...] | None = None
    """Keep only sequences of these modes."""
    loss_modes: tuple[int, ...] | None = None
    """The modes that are to be learned, as the manifest is to say; None: with `chat`, 1; else what
    the inputs' manifests say.
    """
    mix_tokenizers: bool = False
    """Let tokens of different tokenizers into one dataset, whose manifest then names none."""
    dedup: bool = False
    """Keep the first of documents with the same tokens."""
    shuffle_seed: int | None = None
    """Shuffle all documents by this seed; None: the order of the inputs."""
    origins: bool = False
    """Keep beside each shard where its documents came from: file, line or row, and id."""
    id_field: str | None = None
    """Of records, the key or column of the id that origins keep, also nested (`meta.id`); None: `id`,
    or else `url`.
    """
    kind: Kind = "bin"
    """The form of the output: a Megatron pair, a pair whose tokens are .bin.zst, or a tar file of
    both.
    """
    level: int = LEVEL
    """Compression of .bin.zst, from 1 (fast) to 22 (small)."""
    frame_bytes: int = FRAME_BYTES
    """Token bytes of a frame of .bin.zst, which is decompressed as a whole."""
    shard_bytes: int | None = None
    """Token bytes of a shard, at most unless one document has more; None: one shard."""
    on_error: Literal["stop", "skip"] = "stop"
    """What a broken record does: it stops the conversion, or is left out, counted and told of."""
    max_record_bytes: int = 1 << 30
    """Bytes of a record, or of a file that is one text, at most. A larger one is treated as
    `on_error` says. A record takes several times its bytes of memory.
    """
    max_errors: str | int | None = None
    """With `on_error` skip: the conversion ends with an error where more records than so many
    (`100`), or than a part of all (`1%`), were skipped.
    """

    def __post_init__(self) -> None:
        self._check_choices()
        self._check_numbers()
        if self.dtype is not None:
            token_dtype_named(self.dtype)
        # uint32 is no dtype of the .idx; its ids are stored as int32, where they fit.
        if self.input_dtype not in (None, "uint32"):
            token_dtype_named(str(self.input_dtype))
        self._check_chat()
        if self.max_errors is not None:
            self.most_errors(0)
            if self.on_error != "skip":
                raise ConfigError(
                    "max_errors (--max-errors) bounds what is skipped; set on_error (--on-error) "
                    "to 'skip' too"
                )
        if self.id_field is not None and not self.origins:
            raise ConfigError(
                "id_field (--id-field) says which id origins keep; ask for them too (--origins)"
            )
        if not self.keys:
            raise ConfigError("keys (--key) is empty; name the key that holds the text")
        for key in self.keys:
            key_mode(key)

    def _check_choices(self) -> None:
        if self.kind not in SUFFIXES:
            raise ConfigError(f"kind (--format) {self.kind!r} is not one of {', '.join(SUFFIXES)}")
        if self.read_as not in (None, "text", "lines", "json"):
            raise ConfigError(
                f"read_as (--as) is {self.read_as!r}; it must be 'text', 'lines' or 'json'"
            )
        patterns = {"hf_split": [self.hf_split], "include": self.include, "exclude": self.exclude}
        for name, values in patterns.items():
            if "" in values:
                raise ConfigError(
                    f"{name} (--{name.replace('_', '-')}) is empty; name what it chooses, or leave "
                    f"it out"
                )
        if self.long not in ("cut", "drop"):
            raise ConfigError(f"long (--long) is {self.long!r}; it must be 'cut' or 'drop'")
        if self.on_error not in ("stop", "skip"):
            raise ConfigError(
                f"on_error (--on-error) is {self.on_error!r}; it must be 'stop' or 'skip'"
            )
        if self.pack_long not in ("split", "drop"):
            raise ConfigError(
                f"pack_long (--pack-long) is {self.pack_long!r}; it must be 'split' or 'drop'"
            )
        if self.pack is None and self.pack_long == "drop":
            raise ConfigError(
                "pack_long (--pack-long) is 'drop', which is of bins (pack, --pack), and none are "
                "asked for; documents of any dataset are dropped by max_tokens and long='drop'"
            )
        if self.pack is not None and self.kind == "tar":
            raise ConfigError(
                "pack (--pack) needs tokens that lie end to end, which those of a tar do not; "
                "write kind (--format) 'bin' or 'zst'"
            )
        if self.special_tokens not in (None, "parse", "text"):
            raise ConfigError(
                f"special_tokens (--special-tokens) is {self.special_tokens!r}; it must be 'parse' "
                f"or 'text'"
            )

    def _check_numbers(self) -> None:
        if not 1 <= self.max_record_bytes < 2**63:
            raise ConfigError(
                f"max_record_bytes (--max-record-bytes) is {self.max_record_bytes}; it must be a "
                f"positive number of bytes"
            )
        if self.shard_bytes is not None and self.shard_bytes < 1:
            raise ConfigError(
                f"shard_bytes (--shard-size) is {self.shard_bytes}; it must be a positive number "
                f"of bytes"
            )
        if self.pack is not None and not 2 <= self.pack <= MOST_PACKED:
            raise ConfigError(
                f"pack (--pack) is {self.pack}; it must lie between 2 and {MOST_PACKED:,} tokens"
            )
        if self.max_documents is not None and (self.pack is None or self.max_documents < 1):
            raise ConfigError(
                f"max_documents (--max-documents) is {self.max_documents}; it is for bins (pack, "
                f"--pack), and at least 1"
            )
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens):
            raise ConfigError(
                f"max_tokens (--max-tokens) is {self.max_tokens}; it must be at least 1, and at "
                f"least min_tokens (--min-tokens)"
            )
        if self.shuffle_seed is not None and not 0 <= self.shuffle_seed < 2**64:
            raise ConfigError(
                f"shuffle_seed is {self.shuffle_seed}; it (--seed) must lie in [0, 2**64)"
            )
        if not 1 <= self.level <= 22:
            raise ConfigError(f"level (--level) is {self.level}; zstd has levels 1 to 22")
        if not 1024 <= self.frame_bytes <= 1 << 30:
            raise ConfigError(
                f"frame_bytes is {self.frame_bytes}; it must lie between 1 KiB and 1 GiB"
            )
        for mode in self.loss_modes or ():
            if not -128 <= mode <= 127:
                raise ConfigError(
                    f"loss_modes (--loss-mode) holds {mode}; modes lie between -128 and 127"
                )

    def _check_chat(self) -> None:
        if self.chat_template is None:
            if self.template_vars:
                raise ConfigError(
                    "template_vars (--template-var) are for a chat template; name it too by "
                    "chat_template (--chat-template)"
                )
            return
        if not self.chat:
            raise ConfigError(
                "chat_template (--chat-template) is for conversations; set chat (--chat) too"
            )
        if self.bos is not None or self.add_special_tokens:
            raise ConfigError(
                "a chat template writes its special tokens itself: leave out bos (--bos) and "
                "add_special_tokens"
            )

    def most_errors(self, records: int) -> int | None:
        """The most of so many records that may be skipped; None: as many as there are.

        Raises ConfigError for a limit that is none.
        """
        if self.max_errors is None:
            return None
        parsed = re.fullmatch(r"(\d+)|(\d+(?:\.\d+)?)%", str(self.max_errors))
        if not parsed or float(parsed[2] or 0) > 100:
            raise ConfigError(
                f"max_errors (--max-errors) is {self.max_errors!r}; give a number of records, or a "
                f"part of all of them, 1% for instance"
            )
        return int(parsed[1]) if parsed[1] else int(records * float(parsed[2]) / 100)

    @property
    def key_modes(self) -> list[tuple[str, int]]:
        """(key, mode) of each key."""
        return [key_mode(key) for key in self.keys]

    @property
    def makes_modes(self) -> bool:
        """Whether text becomes sequences with modes."""
        return self.chat or any(":" in key for key in self.keys)

    @property
    def learned_modes(self) -> list[int] | None:
        """Of the modes that text gets, those that are to be learned; None: modes mean something
        else, or there are none.
        """
        if self.loss_modes is not None:
            return list(self.loss_modes)
        return [1] if self.chat else None

    @property
    def array_dtype(self) -> np.dtype[Any]:
        """Of raw token arrays without a header, little-endian."""
        return np.dtype(self.input_dtype or "uint16").newbyteorder("<")

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """What `load_tokenizer` is told beside the name."""
        return {
            "special_tokens": self.special_tokens,
            "add_special_tokens": self.add_special_tokens,
            "pattern": self.tiktoken_pattern,
        }

    @property
    def plain(self) -> bool:
        """Whether documents of tokens pass as they are, in their order."""
        leaves_out = self.dedup or bool(self.min_tokens) or self.modes is not None
        cuts = self.max_tokens is not None
        shuffles = self.shuffle_seed is not None
        packs = self.pack is not None
        return not (leaves_out or cuts or shuffles or packs or self.origins)

    def digest(self) -> str:
        """Changes with every setting but those that choose files: of these, the files that were
        chosen tell.
        """
        settings = asdict(self)
        # An end by too many errors is gone on from by the same command with a higher limit.
        del settings["include"], settings["exclude"], settings["hf_split"], settings["max_errors"]
        if not self.origins:
            # What was begun before there were origins goes on.
            del settings["origins"], settings["id_field"]
        return digest_of_json(settings)


@dataclass(frozen=True, kw_only=True)
class Runner:
    """How the work is done; the output does not depend on it."""

    workers: int = 0
    """Units and shards that are worked on at once, by threads and processes of this machine; 0: one
    per core. Not for Ray.
    """
    engine: Literal["local", "ray"] = "local"
    """This machine, or a Ray cluster (`RAY_ADDRESS`)."""
    memory_bytes: int = 4096 * MiB
    """For shuffling and for the removal of duplicates, on each machine."""
    work: str | None = None
    """A folder or URL for what is unfinished, which all machines of a cluster can write; None:
    beside the output, or in the cache when that is remote.
    """
    restart: bool = False
    """Forget what an interrupted run has done."""
    merges_tasks: bool = False
    """Read nothing of the inputs, but make the dataset of what tasks have done: `merge_tasks`."""

    def __post_init__(self) -> None:
        if self.workers < 0:
            raise ConfigError(
                f"workers (--workers) is {self.workers}; give a positive number, or 0 for one per "
                f"core"
            )
        if self.engine not in ("local", "ray"):
            raise ConfigError(f"engine (--engine) is {self.engine!r}; it must be 'local' or 'ray'")
        if self.memory_bytes < MiB:
            raise ConfigError(
                f"memory_bytes (--memory) is {self.memory_bytes}; it must be at least {MiB} (1M)"
            )


def key_mode(key: str) -> tuple[str, int]:
    """("text", 0) of "text", ("answer", 1) of "answer:1". Raises ConfigError."""
    name, colon, mode = key.rpartition(":")
    if not colon:
        return key, 0
    is_number = mode.lstrip("-").isdigit()
    # An int8 of each sequence.
    if not name or not is_number or not -128 <= int(mode) <= 127:
        raise ConfigError(
            f"key {key!r}: write it as NAME, or NAME:MODE with a mode between -128 and 127"
        )
    return name, int(mode)
