"""The settings of a conversion: what its output depends on, and how the work is done.

The command line takes them from here: the group and name of a flag from the type of its field, its
help from the first sentence of the field's docstring.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Annotated, Any, Literal

from streammega.config import MiB
from streammega.config.validate import Flag, Ge, Le, Lt, check_fields, refuse_unknown
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.dataset.names import Kind

INPUTS = "What is read"
TEXT = "How text becomes tokens"
DOCUMENTS = "Which documents, in which order"
OUTPUT = "What is written"
WORK = "How the work is done"
RARE = "Rarely needed"


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ConvertOptions:
    """How documents become tokens, which are kept, and how they are laid out."""

    text_keys: Annotated[tuple[str, ...], Flag(INPUTS, "--text-key", metavar="KEY")] = ("text",)
    """Key or column of the text; repeat for more sequences. It may be nested (`meta.text`), and of
    `text,content` the first that is there counts. KEY:MODE gives its tokens a mode. Each is a sequence
    of the document.
    """
    include: Annotated[tuple[str, ...], Flag(INPUTS, metavar="PATTERN")] = ()
    """Read only such files of folders and globs; repeat for more. A pattern is of names, or, with a
    slash, of paths; `*` matches slashes too. One that ends in a suffix which names no format (`*.py`,
    `*.md`) takes such files as one text each. None: all files of known suffixes.
    """
    exclude: Annotated[tuple[str, ...], Flag(INPUTS, metavar="PATTERN")] = ()
    """Leave such files and folders out; repeat for more. It is for folders and globs."""
    hf_split: Annotated[str | None, Flag(INPUTS, metavar="NAME")] = None
    """Read only files of this split, by their names; or all. Splits are train, validation, test and
    the like. Of several such names on a path the last counts. None: inputs of several splits are an
    error.
    """
    strict: Annotated[bool, Flag(INPUTS)] = False
    """End with an error if files are left out. It lists reasons and first names. What --include,
    --exclude and --hf-split leave out is no reason, nor is another name of a file that is read.
    """
    tar_member: Annotated[str | None, Flag(RARE, metavar="SUFFIX")] = None
    """Which member of a sample in a .tar is the document: txt. A sample is the members with one name up
    to its first dot, so `ocr.txt` is that of `00042.ocr.txt`. A pattern takes all that match it.
    None: several are an error that lists them.
    """
    eod_id: Annotated[int | None, Flag(RARE)] = None
    """The id that ends documents, where the inputs are tokens."""
    on_error: Annotated[Literal["stop", "skip"], Flag(INPUTS)] = "stop"
    """Stop at a broken record, or skip it and report it. What follows it is
    left out where its end cannot be found: in JSON arrays, in CSV files with an open quote, and in
    damaged compression.
    """
    max_record_bytes: Annotated[
        int, Flag(RARE, "--max-record-bytes", metavar="SIZE"), Ge(1), Lt(2**63)
    ] = 1 << 30
    """Largest record, or file that is one text. A larger one is treated as --on-error says. A record
    takes several times its bytes of memory.
    """
    max_errors: Annotated[str | int | None, Flag(RARE, metavar="N|N%")] = None
    """End with an error when more records than this are skipped. It is for --on-error skip: a number of
    records (`100`), or a part of all (`1%`), which is compared at the end. All units and tasks count
    together. The same command with a higher limit goes on.
    """
    tokenizer: Annotated[str | None, Flag(TEXT, metavar="NAME|FILE")] = None
    """What makes tokens of text: a tokenizer.json, a SentencePiece .model, a .tiktoken file,
    tiktoken:NAME, a name on the Hugging Face hub, or bytes. Also a folder with a tokenizer.json, or
    `vocab.json,merges.txt` (Megatron's GPT2BPETokenizer). None: the inputs hold tokens.
    """
    eod: Annotated[str | None, Flag(TEXT, metavar="TOKEN")] = None
    """The end-of-document token. None: it is found by its usual names. The `eos_token` of a
    tokenizer_config.json goes before these, unless it ends a turn (`<|im_end|>`, `<|eot_id|>`).
    """
    append_eod: Annotated[bool, Flag(TEXT)] = True
    """End every document with the end-of-document token."""
    chat: Annotated[bool, Flag(TEXT)] = False
    """Records hold messages; answers get mode 1, all else mode 0."""
    chat_template: Annotated[str | None, Flag(TEXT, metavar="NAME|FILE")] = None
    """How messages are written: tokenizer, chatml, llama3, a file. The tokenizer's own may be one of
    several (`tokenizer:NAME`). Answers of the assistant get mode 1, all else 0. None: `<|role|>`, a
    newline, the text and the end-of-document token.
    """
    special_tokens_in_text: Annotated[Literal["parse", "text"] | None, Flag(RARE)] = None
    """What special tokens in a text become: themselves, or text. `parse` encodes them as special tokens,
    `text` as ordinary characters. None: as the tokenizer's library does, `parse` for Hugging Face
    (Megatron too) and `text` for tiktoken.
    """
    bos: Annotated[str | None, Flag(RARE, metavar="TOKEN")] = None
    """A token that begins every document."""
    add_special_tokens: Annotated[bool, Flag(RARE)] = False
    """Let a tokenizer.json's post-processor add its tokens. Megatron's name of it is
    `--tokenizer-hf-include-special-tokens`.
    """
    tiktoken_pattern: Annotated[str | None, Flag(RARE, metavar="NAME|REGEX")] = None
    """How a file of byte pairs cuts text: llama3, or a regular expression. Names are gpt2, cl100k_base,
    o200k_base, llama3, llama3.1 and qwen, with their special tokens. With it, a .model file is one of
    byte pairs.
    """
    min_tokens: Annotated[int, Flag(DOCUMENTS), Ge(0)] = 0
    """Drop documents with fewer tokens."""
    max_tokens: Annotated[int | None, Flag(DOCUMENTS)] = None
    """Cut or drop documents with more tokens."""
    max_tokens_policy: Annotated[Literal["cut", "drop"], Flag(DOCUMENTS)] = "cut"
    """What to do with longer documents. Cut ones keep their first tokens and, in the last place, the
    end-of-document token.
    """
    pack_length: Annotated[int | None, Flag(RARE), Ge(2), Le(1 << 24)] = None
    """Put documents into bins of so many tokens, uncut. Train with that sequence length.
    None: documents follow each other without padding.
    """
    pack_overflow: Annotated[Literal["split", "drop"], Flag(RARE)] = "split"
    """What to do with what fits no bin. Split documents become several of the length of a bin,
    and one of the rest.
    """
    pack_max_documents: Annotated[int | None, Flag(RARE), Ge(1)] = None
    """Most documents of a bin. None: as many as fit."""
    keep_modes: Annotated[
        tuple[int, ...] | None, Flag(RARE, "--keep-mode", metavar="MODE"), Ge(-128), Le(127)
    ] = None
    """Keep only sequences of this mode; repeat for more."""
    loss_modes: Annotated[
        tuple[int, ...] | None, Flag(RARE, "--loss-mode", metavar="MODE"), Ge(-128), Le(127)
    ] = None
    """A mode whose tokens are learned; repeat for more. It is 1 with --chat. The manifest says so. None:
    what the inputs' manifests say.
    """
    allow_mixed_tokenizers: Annotated[bool, Flag(RARE)] = False
    """Let tokens of different tokenizers into one dataset. Its manifest then names none."""
    dedup: Annotated[bool, Flag(DOCUMENTS)] = False
    """Keep the first of documents with the same tokens."""
    drop_columns: Annotated[bool, Flag(RARE)] = False
    """Leave the columns of datasets out. Otherwise all inputs must have the same ones, which are carried
    along.
    """
    shuffle_seed: Annotated[int | None, Ge(0), Lt(2**64)] = None
    """Shuffle all documents by this seed (--shuffle, --seed). None: the order of the inputs."""
    format: Annotated[Literal["bin", "zst", "tar"], Flag(OUTPUT)] = "bin"
    """A Megatron pair, one with .bin.zst, or a WebDataset tar. Its zstd is seekable; a tar file has an
    .idx too.
    """
    zstd_level: Annotated[int, Flag(RARE), Ge(1), Le(22)] = 3
    """How zstd compresses: 1 (fast) to 22 (small)."""
    shard_bytes: Annotated[int | None, Flag(OUTPUT, "--shard-size", metavar="SIZE"), Ge(1)] = None
    """Bytes of tokens in a shard: 1G. None: there is one shard. A shard is larger where one document is.
    """
    dtype: Annotated[str | None, Flag(RARE)] = None
    """The dtype of the output. None: it follows from the vocabulary or the inputs."""
    provenance: Annotated[bool, Flag(OUTPUT)] = False
    """Keep where each document came from, for trace. It is the file, the line or row, and the id, in a
    Parquet file of each shard.
    """
    id_field: Annotated[str | None, Flag(RARE, metavar="KEY")] = None
    """Key or column of the id that --provenance keeps. None: `id`, or `url`. It may be nested
    (`meta.id`). Ids have 1,024 characters at most. A warning names a field that no record has.
    """

    def __post_init__(self) -> None:
        check_fields(self)
        self._check_dtypes()
        self._check_documents()
        self._check_chat()
        for name in ("hf_split", "include", "exclude"):
            value = getattr(self, name)
            if "" in (value if isinstance(value, tuple) else (value,)):
                raise ConfigError(
                    f"{name} (--{name.replace('_', '-')}) is empty; name what it chooses, or leave "
                    f"it out"
                )
        if self.max_errors is not None:
            self.max_errors_of(0)
            if self.on_error != "skip":
                raise ConfigError(
                    "max_errors (--max-errors) bounds what is skipped; set on_error (--on-error) "
                    "to 'skip' too"
                )
        if self.id_field is not None and not self.provenance:
            raise ConfigError(
                "id_field (--id-field) says which id is kept; set provenance (--provenance) too"
            )
        if not self.text_keys:
            raise ConfigError("text_keys (--text-key) is empty; name the key that holds the text")
        for key in self.text_keys:
            key_mode(key)

    def _check_dtypes(self) -> None:
        # imported here: the command line reads the flags from this module before it needs any of that
        from streammega.dataset.idx import token_dtype_named

        if self.dtype is not None:
            token_dtype_named(self.dtype)

    def _check_documents(self) -> None:
        if self.pack_length is None and self.pack_overflow == "drop":
            raise ConfigError(
                "pack_overflow (--pack-overflow) drop needs bins: set pack_length (--pack-length). To "
                "drop long documents without packing, use max_tokens (--max-tokens) with "
                "max_tokens_policy (--max-tokens-policy) drop"
            )
        if self.pack_length is None and self.pack_max_documents is not None:
            raise ConfigError(
                "pack_max_documents (--pack-max-documents) limits the documents of a bin: set "
                "pack_length (--pack-length)"
            )
        if self.pack_length is not None and self.format == "tar":
            raise ConfigError(
                "pack_length (--pack-length) does not work with tar files, whose documents are apart; "
                "set format (--format) to 'bin' or 'zst'"
            )
        if self.max_tokens is None and self.max_tokens_policy == "drop":
            raise ConfigError(
                "max_tokens_policy (--max-tokens-policy) drop needs a limit: set max_tokens "
                "(--max-tokens)"
            )
        if self.max_tokens is not None and self.max_tokens < max(1, self.min_tokens):
            raise ConfigError(
                f"max_tokens (--max-tokens) is {self.max_tokens}; it must be at least 1, and at "
                f"least min_tokens (--min-tokens)"
            )

    def _check_chat(self) -> None:
        if self.chat_template is None:
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

    def max_errors_of(self, records: int) -> int | None:
        """How many of so many records may be skipped; None: all of them.

        Raises ConfigError for a limit that is neither.
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
        return [key_mode(key) for key in self.text_keys]

    @property
    def makes_modes(self) -> bool:
        """Whether text becomes sequences with modes."""
        return self.chat or any(":" in key for key in self.text_keys)

    @property
    def learned_modes(self) -> list[int] | None:
        """The modes of text that are to be learned; None if modes mean something else, or text gets
        none.
        """
        if self.loss_modes is not None:
            return list(self.loss_modes)
        return [1] if self.chat else None

    @property
    def tokenizer_settings(self) -> dict[str, Any]:
        """Arguments of `load_tokenizer` besides the name."""
        return {
            "special_tokens_in_text": self.special_tokens_in_text,
            "add_special_tokens": self.add_special_tokens,
            "pattern": self.tiktoken_pattern,
        }

    @property
    def copies_documents(self) -> bool:
        """Whether documents of tokens pass as they are, in their order."""
        leaves_out = self.dedup or bool(self.min_tokens) or self.keep_modes is not None
        cuts = self.max_tokens is not None
        shuffles = self.shuffle_seed is not None
        packs = self.pack_length is not None
        return not (leaves_out or cuts or shuffles or packs or self.provenance)

    def format_of(self, output: str) -> Kind:
        """The format of an output: its suffix says it (`web.bin.zst`), else the setting (`web`).

        Raises ConfigError where both say another one.
        """
        from streammega.dataset.names import split_name  # see `_check_dtypes`

        prefix, format = split_name(output)
        if prefix == output or output.endswith(".idx"):
            return self.format
        if self.format not in ("bin", format):
            raise ConfigError(
                f"{output!r}: its suffix says format {format}, and format (--format) is "
                f"{self.format}; leave out one"
            )
        return format

    def digest(self) -> str:
        """Changes with every setting but those that choose files: of these, the files that were
        chosen tell.
        """
        settings = asdict(self)
        for name in ("include", "exclude", "hf_split", "strict"):
            del settings[name]
        # An end by too many errors is gone on from by the same command with a higher limit.
        del settings["max_errors"]
        # Those that are carried along are part of the inputs.
        del settings["drop_columns"]
        if not self.provenance:
            # Without provenance, id_field changes nothing in the output.
            del settings["provenance"], settings["id_field"]
        return digest_of_json(settings)


@refuse_unknown
@dataclass(frozen=True, kw_only=True)
class ExecutionConfig:
    """How the work is done; the output does not depend on it."""

    workers: Annotated[int, Flag(WORK), Ge(0)] = 0
    """Units and shards that are worked on at once; 0: all cores. These are the cores of this process's
    affinity and CPU quota. Ray decides for itself.
    """
    shuffle_memory_bytes: Annotated[
        int, Flag(WORK, "--shuffle-memory", metavar="SIZE"), Ge(MiB)
    ] = 4096 * MiB
    """Memory for shuffling and deduplication. It is for each machine."""
    backend: Annotated[Literal["local", "ray"], Flag(RARE)] = "local"
    """Where the work is done. `ray` is at RAY_ADDRESS."""
    work_dir: Annotated[str | None, Flag(WORK, metavar="FOLDER|URL")] = None
    """Where unfinished work is kept. All machines of a cluster must be able to write there. None: in the
    folder of the output, or in the cache for a remote output.
    """
    resume: Annotated[bool, Flag(WORK)] = True
    """Go on with what an interrupted run has done, or forget it. It is a run of the same command."""

    def __post_init__(self) -> None:
        check_fields(self)


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


def digest_of_json(value: Any) -> str:
    """Equal for values that are equal as JSON."""
    return digest_of_bytes(json.dumps(value, sort_keys=True).encode())


def digest_of_bytes(data: bytes, size: int = 12) -> str:
    """A digest of `size` bytes. With 12, no two units of a corpus have the same one by chance."""
    return hashlib.blake2b(data, digest_size=size).hexdigest()
