"""The options of `convert`, each declared once, in the groups in which its help shows them."""

from __future__ import annotations

from typing import Annotated, Any

import typer

INPUTS = "What is read"
TEXT = "How text becomes tokens"
DOCUMENTS = "Which documents, in which order"
OUTPUT = "What is written"
WORK = "How the work is done"


def _option(group: str, *names: str, **settings: Any) -> Any:
    return typer.Option(*names, rich_help_panel=group, **settings)


Inputs = Annotated[
    list[str],
    typer.Argument(
        help="Text, .jsonl, .json, .csv, .parquet, .arrow, .tar, .npy and nanoGPT/llm.c .bin files "
        "([.gz|.bz2|.zst]); folders, also of MDS or litdata shards; .bin/.idx prefixes and "
        "manifests; globs, URLs, @lists of files; - for stdin."
    ),
]
Output = Annotated[str, typer.Argument(help="Prefix to write: a path or s3:// URL.")]

Keys = Annotated[
    list[str] | None,
    _option(
        INPUTS,
        help="Key or column of the text, also nested (meta.text); the first that is there of "
        "text,content; repeat for more sequences; KEY:MODE gives its tokens a mode.",
    ),
]
Include = Annotated[
    list[str] | None,
    _option(
        INPUTS,
        metavar="PATTERN",
        help="Read only such files of folders and globs; repeat for more.",
    ),
]
Exclude = Annotated[
    list[str] | None,
    _option(
        INPUTS,
        metavar="PATTERN",
        help="Leave such files and folders out of folders and globs; repeat for more.",
    ),
]
ReadAs = Annotated[
    str | None,
    _option(
        INPUTS,
        "--as",
        metavar="text|lines|json",
        help="How plain text and files of unknown suffix are read: a file is one text, each line is "
        "one, or JSON records.",
    ),
]
HfSplit = Annotated[
    str | None,
    _option(
        INPUTS,
        metavar="NAME",
        help="Read only files of this split, by their names (train, validation, test, ...); all: "
        "of every split.",
    ),
]
Member = Annotated[
    str | None,
    _option(
        INPUTS, help="Which member is the document, where samples in a .tar have several, e.g. txt."
    ),
]
Chat = Annotated[
    bool, _option(INPUTS, help="Records hold messages; answers get mode 1, all else mode 0.")
]
ChatTemplate = Annotated[
    str | None,
    _option(
        INPUTS,
        help="How messages are written: tokenizer (its template), chatml, llama3, or a file.",
    ),
]
TemplateVars = Annotated[
    list[str] | None,
    _option(
        INPUTS,
        metavar="NAME=VALUE",
        help="A variable of the chat template, e.g. enable_thinking=false (JSON, else text) or "
        "strftime_now=2026-01-31; repeat for more.",
    ),
]
EodId = Annotated[
    int | None, _option(INPUTS, help="The id that ends documents, where the inputs are tokens.")
]
InputDtype = Annotated[
    str | None,
    _option(INPUTS, help="The dtype of raw token arrays without a header; uint16 by default."),
]
OnError = Annotated[
    str,
    _option(
        INPUTS, help="What a broken record does: stop the conversion, or skip it: it is reported."
    ),
]
InputStorage = Annotated[
    list[str] | None,
    _option(
        INPUTS,
        metavar="KEY=VALUE",
        help="A storage option of the inputs alone, where --storage is the output's; repeat for "
        "more.",
    ),
]
InputStorageFile = Annotated[
    str | None,
    _option(
        INPUTS,
        metavar="FILE",
        help="A TOML file with settings of StorageConfig for the inputs, as --storage-file.",
    ),
]
MaxRecordBytes = Annotated[
    str,
    _option(
        INPUTS,
        metavar="SIZE",
        help="Largest record, or file that is one text; a larger one is treated as --on-error says.",
    ),
]
MaxErrors = Annotated[
    str | None,
    _option(
        INPUTS,
        metavar="N|N%",
        help="With --on-error skip: end with an error when more records than this are skipped.",
    ),
]

Tokenizer = Annotated[
    str | None,
    _option(
        TEXT,
        help="What makes tokens of text: a tokenizer.json, a SentencePiece .model, a .tiktoken "
        "file, tiktoken:NAME, a name on the Hugging Face hub, or bytes.",
    ),
]
Merges = Annotated[
    str | None, _option(TEXT, help="The merges.txt of a --tokenizer that is GPT-2's vocab.json.")
]
Eod = Annotated[
    str | None,
    _option(TEXT, help="The end-of-document token; by default it is found by its usual names."),
]
AppendEod = Annotated[
    bool, _option(TEXT, help="End every document with the end-of-document token.")
]
KeepEmpty = Annotated[
    bool,
    _option(
        TEXT,
        help="Keep texts without a single token, empty ones too, as an end-of-document token alone.",
    ),
]
SpecialTokens = Annotated[
    str | None,
    _option(
        TEXT,
        help="What a special token that is spelt in a text becomes: its id (parse), or text "
        "like any other (text); by default what the tokenizer's library makes of it.",
    ),
]
Bos = Annotated[str | None, _option(TEXT, help="A token that begins every document.")]
AddSpecialTokens = Annotated[
    bool, _option(TEXT, help="Let a tokenizer.json's post-processor add its tokens.")
]
TiktokenPattern = Annotated[
    str | None,
    _option(
        TEXT, help="How a .tiktoken file cuts text: gpt2, cl100k_base, o200k_base, llama3, ..."
    ),
]
SplitSentences = Annotated[
    str | None, _option(TEXT, metavar="LANG", help="Make each sentence a sequence, e.g. en.")
]

MinTokens = Annotated[int, _option(DOCUMENTS, help="Drop documents with fewer tokens.")]
MaxTokens = Annotated[
    int | None, _option(DOCUMENTS, help="Cut or drop documents with more tokens; see --long.")
]
Long = Annotated[
    str, _option(DOCUMENTS, help="What to do with documents above --max-tokens: cut or drop.")
]
Pack = Annotated[
    int | None,
    _option(
        DOCUMENTS,
        help="Put documents into bins of so many tokens, without cutting any; train with that "
        "sequence length.",
    ),
]
PackLong = Annotated[
    str, _option(DOCUMENTS, help="What to do with documents longer than --pack: split or drop.")
]
MaxDocuments = Annotated[
    int | None, _option(DOCUMENTS, help="Documents of a bin of --pack, at most.")
]
Modes = Annotated[
    list[int] | None, _option(DOCUMENTS, help="Keep only sequences of this mode; repeat for more.")
]
LossModes = Annotated[
    list[int] | None,
    _option(
        DOCUMENTS, help="A mode whose tokens are learned in training (--chat: 1); repeat for more."
    ),
]
MixTokenizers = Annotated[
    bool, _option(DOCUMENTS, help="Let tokens of different tokenizers into one dataset.")
]
Dedup = Annotated[
    bool, _option(DOCUMENTS, help="Keep the first of documents with the same tokens.")
]
Shuffle = Annotated[bool, _option(DOCUMENTS, help="Shuffle all documents.")]
Seed = Annotated[int, _option(DOCUMENTS, help="The seed of --shuffle.")]

OutputDtype = Annotated[
    str | None,
    _option(
        OUTPUT,
        help="The dtype of the output; it follows from the vocabulary or the inputs by default.",
    ),
]
Origins = Annotated[
    bool,
    _option(
        OUTPUT, "--origins", help="Keep beside each shard where its documents came from; see trace."
    ),
]
IdField = Annotated[
    str | None,
    _option(OUTPUT, help="Key or column of the id that --origins keeps; else id, or url."),
]
Form = Annotated[
    str, _option(OUTPUT, help="What is written: bin, zst (seekable zstd) or tar (WebDataset).")
]
Level = Annotated[
    int, _option(OUTPUT, help="How hard zstd compresses, from 1 (fast) to 22 (small).")
]
ShardSize = Annotated[
    str | None,
    _option(OUTPUT, help="Bytes of tokens in a shard, e.g. 1G; by default there is one shard."),
]
Overwrite = Annotated[bool, _option(OUTPUT, help="Replace an existing dataset.")]
AppendTo = Annotated[
    str | None,
    _option(
        OUTPUT,
        metavar="PREFIX",
        help="Then make the next version of this dataset beside it, with these shards too.",
    ),
]
Report = Annotated[str | None, _option(OUTPUT, help="Write the report to this file, as JSON.")]
Plot = Annotated[
    str | None, _option(OUTPUT, help="Write the histogram of document lengths to this PNG.")
]

Memory = Annotated[str, _option(WORK, help="Memory for shuffling and deduplication, e.g. 16G.")]
Workers = Annotated[
    int, _option(WORK, help="Units and shards that are worked on at once; 0: one per core.")
]
Engine = Annotated[
    str, _option(WORK, help="Where the work is done: local, or ray (see RAY_ADDRESS).")
]
Work = Annotated[
    str | None,
    _option(
        WORK, help="Folder or URL for what is unfinished; by default it lies beside the output."
    ),
]
Task = Annotated[
    str | None,
    _option(
        WORK,
        metavar="i/N",
        help="Do the share of task i (from 0 on) of N in the shared folder --work; merge: make "
        "the dataset when all have ended.",
    ),
]
Restart = Annotated[bool, _option(WORK, help="Forget what an interrupted run has done.")]
DryRun = Annotated[
    bool,
    _option(
        WORK,
        "--dry-run",
        help="Write nothing: print the plan, the first documents as tokens, and an estimate.",
    ),
]
