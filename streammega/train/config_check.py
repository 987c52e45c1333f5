"""A check at the start that all ranks train the same run on the same data.

A different copy of the data on one node would make another order.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

import torch
import torch.distributed as dist

import streammega
from streammega.errors import ConfigError
from streammega.loading import StreamLoader
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD, has_cpu_backend
from streammega.train.config import RunConfig

MAY_DIFFER = {
    "storage",
    "storage_by_prefix",
    "index_cache_dir",
    "index_publish_url",
    "out_dir",
    "blend",
    "blend_per_split",
    "validation",
    "follow",
    "phases",
    "exclude_documents",
}
"""Places of data may differ from node to node. Its content may not: its fingerprint is compared."""
MAX_RANKS = 8
"""Ranks that a message names."""
MAX_CHARACTERS = 80
"""Characters of a value that a message shows."""


def config_facts(config: RunConfig, loader: StreamLoader) -> dict[str, str]:
    """What must be the same on every rank: settings, the identity of the data and its order, versions.
    It has no secrets.
    """
    facts: dict[str, str] = {"streammega": streammega.__version__, "torch": torch.__version__}
    for section in ("data", "model", "train", "parallel"):
        settings = getattr(config, section)
        for item in fields(settings):
            if item.name not in MAY_DIFFER:
                facts[f"{section}.{item.name}"] = repr(getattr(settings, item.name))
    # Without names of datasets and files, which may differ from node to node.
    phases = [
        replace(phase, blend=None, restart_datasets=(), exclude_documents=())
        for phase in config.data.phases
    ]
    facts["data.phases"] = repr(phases)
    if config.data.follow is not None:
        facts["data.follow.check_every_samples"] = repr(config.data.follow.check_every_samples)
    # The identity of all samples, with the data of later phases: they are not compared again.
    for name, value in loader.dataset.samples.identity().items():
        facts[f"the data's {name}"] = json.dumps(value, sort_keys=True)
    return facts


def check_ranks_agree(facts: Mapping[str, str], ranks: Ranks, device: torch.device) -> None:
    """Compare the facts of all ranks; collective.

    Raises ConfigError on every rank where they differ, which names the ranks and the facts.
    """
    group = ranks.group(WORLD)
    if group is None:
        return
    text = json.dumps(dict(facts), sort_keys=True)
    digest = hashlib.blake2b(text.encode(), digest_size=16).digest()
    # A bytearray: torch warns of memory that cannot be written to.
    local = torch.frombuffer(bytearray(digest), dtype=torch.uint8)
    local = local.to("cpu" if has_cpu_backend(group) else device)
    digests = [torch.empty_like(local) for _ in range(group.size())]
    dist.all_gather(digests, local, group=group)
    if all(torch.equal(other, local) for other in digests):
        return
    facts_of_ranks: list[Any] = [None] * group.size()
    # Only if they differ: a thousand ranks would send a megabyte each.
    dist.all_gather_object(facts_of_ranks, dict(facts), group=group)
    raise ConfigError(f"ranks do not train the same run: {differences(facts_of_ranks)}")


def differences(facts_of_ranks: Sequence[Mapping[str, str]]) -> str:
    """A sentence about the facts that differ, and the ranks where they are not as on most; or empty."""
    names = dict.fromkeys(name for facts in facts_of_ranks for name in facts)
    sentences: list[str] = []
    for name in names:
        ranks_with: dict[str, list[int]] = defaultdict(list)
        for rank, facts in enumerate(facts_of_ranks):
            ranks_with[facts.get(name, "missing")].append(rank)
        usual, most_ranks = max(ranks_with.items(), key=lambda item: len(item[1]))
        for value, ranks in ranks_with.items():
            if value != usual:
                sentences.append(
                    f"{name} is {_shorten(value)} on {_name_ranks(ranks)}, "
                    f"{_shorten(usual)} on {_name_ranks(most_ranks)}"
                )
    return "; ".join(sentences)


def _name_ranks(ranks: Sequence[int]) -> str:
    """The first ranks by number, and how many more there are."""
    names = ", ".join(str(rank) for rank in ranks[:MAX_RANKS])
    if len(ranks) > MAX_RANKS:
        names += f" and {len(ranks) - MAX_RANKS} more"
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _shorten(value: str) -> str:
    return value if len(value) <= MAX_CHARACTERS else f"{value[: MAX_CHARACTERS - 3]}..."
