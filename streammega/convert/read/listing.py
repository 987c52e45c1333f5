"""What a conversion would read, as what, and what it would leave out: for people and as JSON."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from streammega.config import StorageConfig
from streammega.convert.options import ConvertOptions
from streammega.convert.read.folders import PassedOver
from streammega.convert.read.inputs import Input, described, find_inputs
from streammega.convert.read.stdin import is_pipe
from streammega.errors import ConfigError
from streammega.errors.redaction import redact_urls

SHOWN_NAMES = 20
"""Of what is left out, for each reason; JSON has more."""


@dataclass(frozen=True, kw_only=True)
class InputList:
    """The inputs of a conversion, and what it would leave out."""

    inputs: list[Input]
    passed: PassedOver

    def as_text(self) -> str:
        """For a terminal."""
        lines = [f"{item.format:<9} {item.size:>15,}  {_shown(item.path)}" for item in self.inputs]
        for reason, count in sorted(self.passed.counts.items()):
            lines.append(f"left out, {reason}: {count:,}")
            names = self.passed.names[reason]
            lines += [f"  {_shown(name)}" for name in names[:SHOWN_NAMES]]
            if count > SHOWN_NAMES:
                lines.append(f"  and {count - SHOWN_NAMES:,} more")
        formats = Counter(item.format for item in self.inputs)
        counted = ", ".join(f"{count:,} {name}" for name, count in sorted(formats.items()))
        size = sum(item.size for item in self.inputs)
        lines.append(f"inputs: {counted}; {size:,} bytes")
        return "\n".join(lines)

    def as_json(self) -> str:
        """Everything; of names that are left out, the first of each reason."""
        values = {
            "inputs": described(self.inputs),
            "files_passed_over": self.passed.counts,
            "names_passed_over": self.passed.names,
        }
        return json.dumps(values, indent=1)


def list_inputs(
    inputs: Sequence[str], options: ConvertOptions, storage: StorageConfig
) -> InputList:
    """The inputs that `convert` would find, and what it would leave out. Raises as `find_inputs`,
    and ConfigError for a pipe.
    """
    for name in inputs:
        if is_pipe(name):
            raise ConfigError(f"{name}: can be read only once, by the conversion; list files")
    passed = PassedOver()
    found = find_inputs(inputs, storage, options, passed)
    return InputList(inputs=found, passed=passed)


def _shown(path: str) -> str:
    """A name as it is, unless a terminal would obey it."""
    path = redact_urls(path)
    return path if path.isprintable() else repr(path)
