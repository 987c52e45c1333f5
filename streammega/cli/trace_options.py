"""The options of `trace`, each declared once."""

from __future__ import annotations

from typing import Annotated

import typer

Step = Annotated[
    int | None, typer.Option(help="A step, counted from 1: what its global batch is made of.")
]
Sample = Annotated[int | None, typer.Option(help="One sample, by its number in the global stream.")]
Find = Annotated[
    str | None,
    typer.Option(
        help="The other way: at which steps a document is seen. NAME#NUMBER, of a dataset or "
        "a shard; its id, URL or FILE:LINE, where convert kept --origins; or a text, with "
        "--tokenizer, for which all tokens are looked through."
    ),
]
Skipped = Annotated[
    bool,
    typer.Option(
        "--skipped",
        help="The documents of skip_documents, and at which steps each was seen before.",
    ),
]
LastStep = Annotated[
    int | None,
    typer.Option(help="With --find and --skipped: up to this step; by default the run's last."),
]
Rank = Annotated[
    int | None, typer.Option(help="Of a step, only what this data-parallel rank reads.")
]
Ranks = Annotated[
    int | None,
    typer.Option(help="How many data-parallel ranks there are: names their samples."),
]
TokenRange = Annotated[
    str | None, typer.Option(help="Only these tokens of each sample: FIRST:BEHIND-THE-LAST.")
]
ValidationSet = Annotated[
    str | None, typer.Option(help="A validation set of its own, by its name in the run.")
]
TokenizerName = Annotated[
    str | None, typer.Option(help="A tokenizer, to show the text; as convert takes it.")
]
