"""What a look at a whole dataset found."""

from __future__ import annotations

from dataclasses import dataclass, field

from streammega.errors.words import pluralize, without_controls

MB = 1e6


@dataclass(kw_only=True)
class VerifyReport:
    """What was looked at, and every problem found, each with its place."""

    name: str
    shards: int = 0
    documents: int = 0
    sequences: int = 0
    tokens: int = 0
    checked_bytes: int = 0
    seconds: float = 0.0
    checksums: bool = False
    lowest_id: int | None = None
    highest_id: int | None = None
    problems: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    def add_ids(self, lowest: int, highest: int) -> None:
        """Widen the range of ids that were seen. Not for several threads at once."""
        if self.lowest_id is None or lowest < self.lowest_id:
            self.lowest_id = lowest
        if self.highest_id is None or highest > self.highest_id:
            self.highest_id = highest

    def as_text(self) -> str:
        """For a terminal: a line for each problem and note, then one for the whole."""
        lines = [f"  {problem}" for problem in self.problems]
        lines += [f"  note: {note}" for note in self.notes]
        lines.append(self._summary())
        return without_controls("\n".join(lines))

    def _summary(self) -> str:
        state = pluralize(len(self.problems), "problem") if self.problems else "sound"
        ids = ""
        if self.highest_id is not None:
            ids = f", ids {self.lowest_id} to {self.highest_id}"
        checksums = "with checksums" if self.checksums else "no checksums known"
        megabytes = self.checked_bytes / MB
        # A dataset of nothing may take no time that the clock can tell.
        speed = megabytes / max(self.seconds, 1e-9)
        return (
            f"{self.name}: {state}; {pluralize(self.shards, 'shard')}, "
            f"{pluralize(self.documents, 'document')}, {pluralize(self.tokens, 'token')}{ids}, "
            f"{checksums}; {megabytes:,.1f} MB at {speed:,.0f} MB/s"
        )
