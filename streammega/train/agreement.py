"""All ranks train the same run on the same data: compared once, at the start.

Another copy on one node is another order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import streammega
from streammega.config import PhaseConfig
from streammega.errors import ConfigError
from streammega.loading import StreamLoader
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD, talks_on_cpu
from streammega.train.config import RunConfig

MAY_DIFFER = {
    "storage",
    "storage_by_prefix",
    "index_cache_dir",
    "shared_index_url",
    "out_dir",
    "blend",
    "blend_per_split",
    "validation",
    "follow",
    "phases",
    "skip_documents",
}
"""Where things lie may differ from node to node; what lies there may not, which its fingerprint
says. Of phases, which name datasets too, see `_without_names`.
"""
NAMED = 8
"""Ranks that a message names."""
MOST_CHARACTERS = 80
"""Of a value that a message shows."""


def facts_of(config: RunConfig, loader: StreamLoader) -> dict[str, str]:
    """What must be the same on every rank: settings, the identity of the data and its order,
    versions. Holds no secrets.
    """
    facts: dict[str, str] = {"streammega": streammega.__version__, "torch": torch.__version__}
    for section in ("data", "model", "train", "parallel"):
        settings = getattr(config, section)
        for item in dataclasses.fields(settings):
            if item.name not in MAY_DIFFER:
                facts[f"{section}.{item.name}"] = repr(getattr(settings, item.name))
    facts["data.phases"] = repr([_without_names(phase) for phase in config.data.phases])
    if config.data.follow is not None:
        facts["data.follow.every_samples"] = repr(config.data.follow.every_samples)
    # of all samples: what a later phase draws from, or a later list skips, is compared now or never
    identity = loader.dataset.samples.identity()
    for name, value in identity.items():
        facts[f"the data's {name}"] = json.dumps(value, sort_keys=True)
    return facts


def _without_names(phase: PhaseConfig) -> PhaseConfig:
    """A phase without the names of datasets and files, which may differ from node to node."""
    return replace(phase, blend=None, restart=(), skip_documents=())


def check_that_ranks_agree(facts: Mapping[str, str], ranks: Ranks, device: torch.device) -> None:
    """Collective over all ranks.

    Raises ConfigError on every rank where one has other facts, and says which and what.
    """
    group = ranks.group(WORLD)
    if group is None:
        return
    digest = _digest_of(facts).to("cpu" if talks_on_cpu(group) else device)
    digests = [torch.empty_like(digest) for _ in range(group.size())]
    dist.all_gather(digests, digest, group=group)
    if all(torch.equal(other, digest) for other in digests):
        return
    facts_of_ranks: list[Any] = [None] * group.size()
    # Only now: a thousand ranks would send a megabyte each.
    dist.all_gather_object(facts_of_ranks, dict(facts), group=group)
    raise ConfigError(f"ranks do not train the same run: {differences(facts_of_ranks)}")


def _digest_of(facts: Mapping[str, str]) -> torch.Tensor:
    """uint8 [16], equal where the facts are."""
    text = json.dumps(dict(facts), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    # A bytearray: torch warns of memory that cannot be written to.
    return torch.frombuffer(bytearray(digest), dtype=torch.uint8)


def differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> str:
    """In words, which facts differ, and on which ranks they are not as on most."""
    names = dict.fromkeys(name for facts in facts_of_ranks for name in facts)
    sentences: list[str] = []
    for name in names:
        ranks_with: dict[str | None, list[int]] = defaultdict(list)
        for rank, facts in enumerate(facts_of_ranks):
            ranks_with[facts.get(name)].append(rank)
        usual, most_ranks = max(ranks_with.items(), key=lambda item: len(item[1]))
        for value, ranks in ranks_with.items():
            if value != usual:
                sentences.append(
                    f"{name} is {_short(value)} on {_ranks(ranks)}, "
                    f"{_short(usual)} on {_ranks(most_ranks)}"
                )
    return "; ".join(sentences)


def _ranks(ranks: Sequence[int]) -> str:
    """The first of some ranks by number, and how many others there are."""
    names = ", ".join(str(rank) for rank in ranks[:NAMED])
    if len(ranks) > NAMED:
        names += f" and {len(ranks) - NAMED} more"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    if len(value) <= MOST_CHARACTERS:
        return value
    return f"{value[: MOST_CHARACTERS - 3]}..."
