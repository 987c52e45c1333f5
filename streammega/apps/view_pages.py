"""The pages of `view`: the values of each template, from the numbers in an address."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

from streammega.apps.view_data import WINDOW, Dataset, Run, Sample
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls

Arguments = Mapping[str, str]
Page = Callable[..., dict[str, Any]]

ROWS = 25
"""Documents or datasets of a page."""
SAMPLES = 4
"""Samples of a page."""
SHOWN_USES = 50
"""Steps that read a document, of those that are listed."""
SEARCHED_SAMPLES = 1 << 22
"""Samples that are searched for a document at once: about a second."""
READERS = 8
"""Threads that read the rows of a page."""
MAX_BANDS = 8
"""Datasets that the figure of the blend names. Smaller ones share a band."""
MAX_CHANGES = 12
"""Datasets whose changes a phase lists, those that change most."""
FIGURE_WIDTH = 440
FIGURE_HEIGHT = 210
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 10, 40
"""Margins of the figure, for its axes."""


class Band(NamedTuple):
    """A rectangle of the figure: the share of a dataset in a phase. color: a number of the style."""

    x: float
    y: float
    width: float
    height: float
    color: int
    letter: str
    title: str


class Pages:
    """The pages of a run, or of one dataset alone."""

    def __init__(self, shown: Run | Dataset) -> None:
        self.run = shown if isinstance(shown, Run) else None
        self._alone = shown if isinstance(shown, Dataset) else None
        self.title = redact_urls(shown.name)

    def routes(self) -> Iterator[tuple[str, str, Page]]:
        """(path of the address, template, the function that gives its values)."""
        if self.run is None:
            yield "/", "dataset.html", self.documents
        else:
            yield "/", "run.html", self.overview
            yield "/step", "step.html", self.step
        yield "/dataset/<dataset>", "dataset.html", self.documents
        yield "/dataset/<dataset>/search", "search.html", self.search
        yield "/dataset/<dataset>/document/<document>", "document.html", self.document

    @property
    def num_datasets(self) -> int:
        """How many datasets there are to look at."""
        return 1 if self.run is None else len(self.run.provenance.datasets)

    def _dataset(self, text: str) -> tuple[int, Dataset]:
        number = _number("dataset", text, 0, self.num_datasets - 1)
        if self.run is not None:
            return number, self.run.dataset(number)
        assert self._alone is not None
        return number, self._alone

    # a run

    def overview(self, arguments: Arguments) -> dict[str, Any]:
        """The datasets of a run, and its blend over the steps."""
        run = self.run
        assert run is not None
        first = _number("first", arguments.get("first", "0"), 0, self.num_datasets - 1)
        numbers = range(first, min(first + ROWS, self.num_datasets))
        with ThreadPoolExecutor(READERS) as pool:
            rows = list(pool.map(functools.partial(_dataset_row, run), numbers))
        return {
            "facts": _facts(run),
            "rows": rows,
            "pages": _pages(first, ROWS, self.num_datasets),
            "phases": [_phase_row(run, number) for number in range(len(run.phases))],
            "figure": _figure(run),
        }

    def step(self, arguments: Arguments) -> dict[str, Any]:
        """Samples of a rank in a step, with their documents and masks."""
        run = self.run
        assert run is not None
        step = _number("step", arguments.get("step", "1"), 1, run.last_step)
        largest = len(run.schedule.samples_of_step(step))
        ranks = _number("ranks", arguments.get("ranks", "1"), 1, largest)
        rank = _number("rank", arguments.get("rank", "0"), 0, ranks - 1)
        count = run.count_samples(step, rank, ranks)
        first = _number("sample", arguments.get("sample", "0"), 0, count - 1)
        start = _number("token", arguments.get("token", "0"), 0, 1 << 40)
        chosen = range(first, min(first + SAMPLES, count))
        samples = run.samples(step, rank, ranks, chosen, (start, start + WINDOW))
        longest = max(sample.tokens for sample in samples)
        if start >= longest:
            raise ConfigError(f"token {start}: these samples have {longest:,} tokens, from 0 on")
        return {
            "step": step,
            "last_step": run.last_step,
            "rank": rank,
            "ranks": ranks,
            "count": count,
            "samples": [self._sample_row(sample) for sample in samples],
            "sample_pages": _pages(first, SAMPLES, count),
            "token_pages": _pages(start, WINDOW, longest),
            "first": first,
            "start": start,
            "crosses": not run.config.data.reset_attention_mask,
        }

    def _sample_row(self, sample: Sample) -> dict[str, Any]:
        run = self.run
        assert run is not None
        documents = []
        for part in sample.traced.runs:
            firsts = run.first_documents(part.name.dataset)
            number = int(firsts[part.name.shard]) + part.name.document
            page = part.start - part.start % WINDOW
            documents.append(
                {
                    "name": f"{run.short_name(part.dataset)}#{number}",
                    "url": f"/dataset/{part.name.dataset}/document/{number}?token={page}",
                    "part": part,
                    "ends": part.stop == part.document_tokens,
                }
            )
        return {**sample._asdict(), "documents": documents}

    # a dataset

    def documents(self, arguments: Arguments, dataset: str = "0") -> dict[str, Any]:
        """Documents of a dataset, a page of them."""
        number, shown = self._dataset(dataset)
        last = max(0, shown.num_documents - 1)
        first = _number("document", arguments.get("first", "0"), 0, last)
        listed = range(first, min(first + ROWS, shown.num_documents))
        with ThreadPoolExecutor(READERS) as pool:
            heads = list(pool.map(shown.head, listed))
        rows = [
            {
                "number": document,
                "tokens": shown.length(document),
                "modes": shown.modes(document),
                "origin": shown.indexed.origin(document),
                "head": head,
            }
            for document, head in zip(listed, heads, strict=True)
        ]
        return {
            "number": number,
            "dataset": shown,
            "rows": rows,
            "first": first,
            "pages": _pages(first, ROWS, shown.num_documents),
            "has_modes": shown.indexed.sequence_modes is not None,
            "has_origins": any(row["origin"] for row in rows),
        }

    def document(self, arguments: Arguments, dataset: str, document: str) -> dict[str, Any]:
        """A document: its text, a page of it."""
        number, shown = self._dataset(dataset)
        chosen = _number("document", document, 0, shown.num_documents - 1)
        length = shown.length(chosen)
        start = _number("token", arguments.get("token", "0"), 0, max(0, length - 1))
        values = {
            "number": number,
            "dataset": shown,
            "document": chosen,
            "length": length,
            "origin": shown.indexed.origin(chosen),
            "parts": shown.parts(chosen, start, min(start + WINDOW, length)),
            "pages": _pages(start, WINDOW, length),
            "has_run": self.run is not None,
            "uses": None,
        }
        if self.run is not None and "uses" in arguments:
            values["uses"] = _uses(self.run, number, chosen, arguments)
        return values

    def search(self, arguments: Arguments, dataset: str) -> dict[str, Any]:
        """Documents that have a text, in one portion of the dataset."""
        number, shown = self._dataset(dataset)
        last = max(0, shown.num_documents - 1)
        text = arguments.get("text", "").replace("\r\n", "\n")
        first = _number("document", arguments.get("document", "0"), 0, last)
        token = _number("token", arguments.get("token", "0"), 0, 1 << 40)
        result = shown.search(text, first, token) if text.strip() else None
        return {
            "number": number,
            "dataset": shown,
            "text": text,
            "first": first,
            "token": token,
            "result": result,
        }


def _number(name: str, text: str, low: int, high: int) -> int:
    """A number of an address. Raises ConfigError."""
    if re.fullmatch(r"[0-9]{1,18}", text) and low <= int(text) <= high:
        return int(text)
    if high < low:
        raise ConfigError(f"{name} {text[:20]!r}: there is none")
    raise ConfigError(f"{name} {text[:20]!r}: give a number from {low:,} to {high:,}")


def _pages(first: int, size: int, total: int) -> dict[str, Any]:
    """Where a page is among all, and where its neighbours begin."""
    stop = min(first + size, total)
    return {
        "first": first,
        "last": stop - 1,
        "total": total,
        "before": max(0, first - size) if first else None,
        "after": stop if stop < total else None,
    }


def _uses(run: Run, dataset: int, document: int, arguments: Arguments) -> dict[str, Any]:
    """The steps of a portion of a run that read a document."""
    end = run.schedule.samples_of_step(run.last_step).stop
    first = _number("sample", arguments["uses"], 0, end - 1)
    stop = min(first + SEARCHED_SAMPLES, end)
    name = run.document_name(dataset, document)
    uses = run.provenance.uses([name], start=first, end=stop)
    steps = [(run.schedule.step_of(use.sample), use) for use in uses]
    taken = [(step, use) for step, use in steps if step is not None]
    return {
        "total": len(taken),
        "shown": taken[:SHOWN_USES],
        "first": first,
        "stop": stop,
        "has_more": stop < end,
    }


def _facts(run: Run) -> list[tuple[str, str]]:
    """What holds for the whole run."""
    data = run.config.data
    train = run.config.train
    end = run.schedule.samples_of_step(run.last_step).stop
    facts = [
        ("order", f"{data.order}, seed {data.seed}"),
        ("steps", f"{run.last_step:,}"),
        ("samples", f"{end:,}, of {data.sequence_length:,} tokens each"),
        ("global batch", f"{train.global_batch_size:,} samples"),
        ("micro-batch", f"{train.micro_batch_size:,} samples of a rank"),
        ("tokens of the run", f"{run.schedule.tokens_before(end):,}"),
    ]
    if len(run.phases) > 1:
        facts[2] = ("samples", f"{end:,}; phases have {_lengths(run)} tokens each")
    if train.rampup_batch_size is not None:
        start, increment, samples = train.rampup_batch_size
        facts.append(
            ("ramp-up", f"from {start:,} by {increment:,} over the first {samples:,} samples")
        )
    return facts


def _lengths(run: Run) -> str:
    lengths = {phase.sequence_length: None for phase in run.phases}
    return " then ".join(f"{length:,}" for length in lengths)


def _dataset_row(run: Run, number: int) -> dict[str, Any]:
    """A dataset of a run, and what the run takes from it.

    Its sizes are those of manifests where it has them: a whole .idx is read for documents alone.
    """
    name = run.provenance.dataset_name(number)
    shards = run.provenance.shards(number)
    # a blend may name a dataset twice: each place has its own row
    place = run.provenance.dataset_names[:number].count(name)
    entries = []
    for phase in run.phases:
        entries += [item for item in phase.datasets if item.dataset == name][place : place + 1]
    return {
        "number": number,
        "name": name,
        "documents": int(run.first_documents(number)[-1]),
        "tokens": sum(shard.num_tokens for shard in shards),
        "dtype": shards[0].dtype,
        "tokenizer": run.decoder(number).name,
        "samples": sum(item.samples for item in entries),
        "epochs": entries[-1].epochs[1] if entries else 0.0,
        "share": entries[0].share if entries else 0.0,
    }


def _phase_row(run: Run, number: int) -> dict[str, Any]:
    """A phase and what changes at its first sample."""
    phase = run.phases[number]
    changes = _changes(run, number) if number else ["the run begins"]
    return {
        "phase": phase.phase,
        "steps": run.steps(phase),
        "first_sample": phase.first_sample,
        "samples": phase.samples,
        "changes": changes,
    }


def _changes(run: Run, number: int) -> list[str]:
    """What differs between a phase and the one before, in words."""
    before, phase = run.phases[number - 1], run.phases[number]
    changes = []
    sizes = [run.schedule.size_at(item.first_sample) for item in (before, phase)]
    for name, old, new in (
        ("tokens of a sample", before.sequence_length, phase.sequence_length),
        ("samples of a global batch", *sizes),
        ("lanes", before.lanes, phase.lanes),
    ):
        if old != new and old is not None and new is not None:
            changes.append(f"{name}: {old:,} → {new:,}")
    shares = [
        _sums((item.dataset, item.share) for item in part.datasets) for part in (before, phase)
    ]
    names = sorted(shares[0] | shares[1], key=lambda name: -abs(_difference(shares, name)))
    changed = [name for name in names if abs(_difference(shares, name)) > 1e-9]
    for name in changed[:MAX_CHANGES]:
        old, new = (f"{100 * share.get(name, 0.0):.4g} %" for share in shares)
        if name not in shares[0]:
            changes.append(f"{run.short_name(name)} comes in: {new}")
        elif name not in shares[1]:
            changes.append(f"{run.short_name(name)} ends: {old} → 0 %")
        else:
            changes.append(f"{run.short_name(name)}: {old} → {new}")
    if len(changed) > MAX_CHANGES:
        changes.append(f"and {len(changed) - MAX_CHANGES:,} more datasets")
    if phase.first_sample in run.provenance.excluded_documents().values():
        changes.append("more documents are excluded")
    return changes or ["nothing that is taken changes"]


def _sums(parts: Iterable[tuple[str, float]]) -> dict[str, float]:
    """The sum of each dataset, which a blend may name twice."""
    sums: dict[str, float] = {}
    for name, part in parts:
        sums[name] = sums.get(name, 0) + part
    return sums


def _difference(shares: Sequence[Mapping[str, float]], name: str) -> float:
    return shares[1].get(name, 0.0) - shares[0].get(name, 0.0)


def _figure(run: Run) -> dict[str, Any]:
    """The share of each dataset over the steps, as rectangles: a stack for each phase."""
    totals = _sums((item.dataset, item.samples) for phase in run.phases for item in phase.datasets)
    by_size = sorted(totals, key=lambda name: -totals[name])
    named = by_size if len(by_size) <= MAX_BANDS else by_size[: MAX_BANDS - 1]
    others = by_size[len(named) :]
    labels = [*map(run.short_name, named), *([f"{len(others):,} others"] if others else [])]
    inner_width = FIGURE_WIDTH - LEFT - RIGHT
    inner_height = FIGURE_HEIGHT - TOP - BOTTOM
    bands = []
    starts: list[tuple[float, str]] = []
    for phase in run.phases:
        steps = run.steps(phase)
        if steps is None or not phase.samples:
            continue
        x = LEFT + inner_width * (steps[0] - 1) / run.last_step
        width = inner_width * (steps[1] - steps[0] + 1) / run.last_step
        taken = _sums((item.dataset, item.samples / phase.samples) for item in phase.datasets)
        shares = [taken.get(name, 0.0) for name in named]
        shares += [sum(taken.get(name, 0.0) for name in others)] if others else []
        y = float(TOP + inner_height)
        for color, (label, share) in enumerate(zip(labels, shares, strict=True)):
            height = inner_height * share
            y -= height
            letter = chr(ord("A") + color) if width > 14 and height > 12 else ""
            title = f"{label}: {100 * share:.3g} % of steps {steps[0]:,} to {steps[1]:,}"
            if height > 0:
                bands.append(Band(x, y, width, height, color, letter, title))
        if not starts or x - starts[-1][0] > 55:
            starts.append((x, f"{steps[0]:,}"))
    end = FIGURE_WIDTH - RIGHT
    ticks = [tick for tick in starts if end - tick[0] > 55 or tick is starts[0]]
    return {
        "width": FIGURE_WIDTH,
        "height": FIGURE_HEIGHT,
        "left": LEFT,
        "right": end,
        "top": TOP,
        "bottom": TOP + inner_height,
        "bands": bands,
        "ticks": [*ticks, (end, f"{run.last_step:,}")],
        "legend": [
            (chr(ord("A") + color), color, label, name)
            for color, (label, name) in enumerate(
                zip(labels, [*named, ""][: len(labels)], strict=True)
            )
        ],
    }
