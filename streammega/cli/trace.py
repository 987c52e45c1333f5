"""The command that explains a run's steps, and finds documents in them: computed of its config,
without a log of the run.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

import typer

from streammega.cli.options import AsJson, Html, Overrides, RunFile, Split
from streammega.cli.render import show_report
from streammega.errors import ConfigError

if TYPE_CHECKING:
    from streammega.cli.trace_report import TracedRunFile
    from streammega.convert.tokenize.tokenizers import Tokenizer
    from streammega.samples.traced import DocumentName
    from streammega.train.config import RunConfig

MOST_FOUND = 100
"""Documents with a text that are told of: a text that is in more of them says little of any."""
LEAST_INNER = 3
"""Ids that are left of a text without its first and last for these to be left out: at its ends a
text that goes on is cut into other tokens.
"""


def trace(
    config: RunFile,
    overrides: Overrides = None,
    step: Annotated[
        int | None, typer.Option(help="A step, counted from 1: what its global batch is made of.")
    ] = None,
    sample: Annotated[
        int | None, typer.Option(help="One sample, by its number in the global stream.")
    ] = None,
    find: Annotated[
        str | None,
        typer.Option(
            help="The other way: at which steps a document is seen. NAME#NUMBER, of a dataset or "
            "a shard; its id, URL or FILE:LINE, where convert kept --origins; or a text, with "
            "--tokenizer, for which all tokens are looked through."
        ),
    ] = None,
    skipped: Annotated[
        bool,
        typer.Option(
            "--skipped",
            help="The documents of skip_documents, and at which steps each was seen before.",
        ),
    ] = False,
    last_step: Annotated[
        int | None,
        typer.Option(help="With --find and --skipped: up to this step; by default the run's last."),
    ] = None,
    rank: Annotated[
        int | None, typer.Option(help="Of a step, only what this data-parallel rank reads.")
    ] = None,
    ranks: Annotated[
        int | None,
        typer.Option(help="How many data-parallel ranks there are: names their samples."),
    ] = None,
    tokens: Annotated[
        str | None,
        typer.Option(help="Only these tokens of each sample: START:STOP (STOP is excluded)."),
    ] = None,
    split: Split = "train",
    validation: Annotated[
        str | None, typer.Option(help="A validation set of its own, by its name in the run.")
    ] = None,
    tokenizer: Annotated[
        str | None, typer.Option(help="A tokenizer, to show the text; as convert takes it.")
    ] = None,
    as_json: AsJson = False,
    html: Html = None,
) -> None:
    """Say which documents a step of a run is made of, or at which steps a document is seen.

    No log of the run is needed: the order is computed. Of the data only .idx files are read, and
    with --tokenizer the tokens.
    """
    from streammega.cli import trace_report as reporting
    from streammega.train.config import load_run

    _check_asked(step, sample, find, skipped, tokens)
    _check_belongs("--rank", rank, "--step", step)
    _check_belongs("--last-step", last_step, "--find or --skipped", find or skipped or None)
    settings = _chosen_run(load_run(config, overrides or []), validation)
    run = reporting.open_run(settings, "valid" if validation else split, ranks)
    for name, number in (("--step", step), ("--last-step", last_step)):
        check_step(run, name, number)
    model = _load(tokenizer)
    last = run.last_step if last_step is None else last_step
    try:
        if skipped:
            report = reporting.skipped_report(run, last)
        elif find is not None:
            report = reporting.readings_report(run, _documents(run, find, model), last)
        else:
            samples = [sample] if sample is not None else _samples_of(run, step or 0, rank)
            decode = None if model is None else model.decode
            report = reporting.trace_report(run, samples, _range(tokens), decode)
    except IndexError as error:  # a number that no sample or document has, as it was given
        raise ConfigError(str(error)) from None
    chosen = {"step": step, "sample": sample, "find": find, "skipped": skipped or None}
    what = ", ".join(f"{name} {value}" for name, value in chosen.items() if value is not None)
    title = f"trace of {config}: {'skipped documents' if skipped else what}"
    show_report({"run": config, **report}, as_json=as_json, html=html, title=title)


def _check_asked(
    step: int | None, sample: int | None, find: str | None, skipped: bool, tokens: str | None
) -> None:
    """Raise ConfigError unless one thing is to be explained, by options that belong to it."""
    from streammega.config import MOST_SAMPLES

    chosen = [name for name in (step, sample, find, skipped or None) if name is not None]
    if len(chosen) != 1:
        raise ConfigError(
            "give one of --step, --sample, --find and --skipped: what is to be explained"
        )
    if sample is not None and sample >= MOST_SAMPLES:
        raise ConfigError(f"--sample {sample}: no run has so many samples")
    if (find is not None or skipped) and tokens is not None:
        raise ConfigError("--tokens is of the samples of --step and --sample, and of nothing else")


def _check_belongs(option: str, value: int | None, to: str, other: object) -> None:
    """Raise ConfigError for an option that would be passed over without the one it is of."""
    if value is not None and other is None:
        raise ConfigError(f"{option} {value}: goes with {to}, which is not given")


def check_step(run: TracedRunFile, option: str, step: int | None) -> None:
    """Raise ConfigError for a step that the run has not."""
    if step is None or 1 <= step <= run.last_step:
        return
    how_to_look_further = ""
    if step > run.last_step:
        setting = "train.iters" if run.split == "train" else "train.eval_iters"
        how_to_look_further = f"; to look further, add {setting}={step}"
    raise ConfigError(
        f"{option} {step}: steps are counted from 1, and the run's last is {run.last_step}"
        f"{how_to_look_further}"
    )


def _chosen_run(run: RunConfig, validation: str | None) -> RunConfig:
    """The run, or the one that has a validation set as its valid split."""
    from streammega.train.splits import validation_sets

    if validation is None:
        return run
    sets = validation_sets(run)
    if validation not in sets:
        known = ", ".join(sets) or "none"
        raise ConfigError(f"there is no validation set {validation!r}; the run has {known}")
    return sets[validation]


def _samples_of(run: TracedRunFile, step: int, rank: int | None) -> list[int]:
    """The samples of a step, or of one rank in it."""
    samples = list(run.steps.samples(step))
    if rank is None:
        return samples
    if run.ranks is None or not 0 <= rank < run.ranks:
        raise ConfigError(f"--rank {rank}: say by --ranks how many there are; the first is 0")
    return [sample for sample in samples if run.place(sample)["rank"] == rank]


def _range(text: str | None) -> tuple[int, int] | None:
    """(3, 40) of "3:40". Raises ConfigError."""
    if text is None:
        return None
    parsed = re.fullmatch(r"(\d+):(\d+)", text)
    if not parsed:
        raise ConfigError(
            f"--tokens {text!r}: write it as START:STOP (STOP is excluded), such as 0:128"
        )
    return int(parsed[1]), int(parsed[2])


def _load(tokenizer: str | None) -> Tokenizer | None:
    if tokenizer is None:
        return None
    from streammega.convert.tokenize.tokenizers import load_tokenizer

    return load_tokenizer(tokenizer)


def _documents(run: TracedRunFile, what: str, model: Tokenizer | None) -> list[DocumentName]:
    """The documents that somebody looks for. Raises ConfigError where there are none."""
    from streammega.dataset.provenance import is_number

    named = run.provenance.documents_from(what)
    if named:
        return named
    name, mark, number = what.rpartition("#")
    if mark and is_number(number):
        return run.provenance.find(name, int(number))
    if model is None:
        raise ConfigError(
            f"--find: no document matches {what!r}. Give NAME#NUMBER, or an id or origin that the shards "
            "keep (convert --origins); to find a text, give the --tokenizer that made the tokens"
        )
    return _documents_with(run, what, model)


def _documents_with(run: TracedRunFile, text: str, model: Tokenizer) -> list[DocumentName]:
    """The documents that have a text, each once."""
    from streammega.samples.find_text import documents_with

    found: dict[DocumentName, None] = {}
    for name, _, ids in documents_with(run.provenance, _patterns(text, model)):
        # The ids are the inner ones of the text: whether it is all there, its letters tell.
        if text in model.decode(ids.tolist()):
            found[name] = None
        if len(found) == MOST_FOUND:
            typer.echo(f"{MOST_FOUND} documents have this text; no more are looked for", err=True)
            break
    if not found:
        raise ConfigError(
            f"no document of this split has the text {text!r}; is it the tokenizer of the data, and "
            "does the text begin and end with whole words?"
        )
    return list(found)


def _patterns(text: str, model: Tokenizer) -> list[list[int]]:
    """Ids by which a text is found: as it is cut at the beginning of a text, and within one."""
    patterns: list[list[int]] = []
    for written in (text, f" {text}"):
        (encoded,) = model.encode([written])
        ids: list[int] = [int(token) for token in encoded]
        if len(ids) >= LEAST_INNER + 2:
            ids = ids[1:-1]
        if ids and ids not in patterns:
            patterns.append(ids)
    if not patterns:
        raise ConfigError(f"--find {text!r}: has no token")
    return patterns
