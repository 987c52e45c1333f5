"""All ranks train the same run on the same data: compared once, at the start.

Another copy on one node is another order.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

import streammega
from streammega.errors import ConfigError
from streammega.loading import StreamLoader
from streammega.parallel import Ranks
from streammega.parallel.groups import WORLD, talks_on_cpu
from streammega.train.config import RunConfig

MAY_DIFFER = {
    "storage",
    "index_cache_dir",
    "shared_index_url",
    "out_dir",
    "blend",
    "blend_per_split",
    "validation",
}
"""Where things lie may differ from node to node; what lies there may not, which its fingerprint
says.
"""
NAMED = 8
"""Ranks that a message names."""


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
    for name, value in json.loads(loader.state_dict()["identity"]).items():
        facts[f"the data's {name}"] = json.dumps(value, sort_keys=True)
    return facts


def check_that_ranks_agree(facts: Mapping[str, str], ranks: Ranks, device: torch.device) -> None:
    """Collective over all ranks.

    Raises ConfigError on every rank where one has other facts, and says which and what.
    """
    group = ranks.group(WORLD)
    if group is None:
        return
    digest = hashlib.blake2b(
        json.dumps(dict(facts), sort_keys=True).encode(), digest_size=16
    ).digest()
    own = torch.frombuffer(bytearray(digest), dtype=torch.uint8).to(
        "cpu" if talks_on_cpu(group) else device
    )
    digests = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(digests, own, group=group)
    if all(torch.equal(other, own) for other in digests):
        return
    told: list[Any] = [None] * group.size()
    # only now: a thousand ranks would send a megabyte each
    dist.all_gather_object(told, dict(facts), group=group)
    raise ConfigError(f"ranks do not train the same run: {differences(told)}")


def differences(told: Sequence[Mapping[str, str]]) -> str:
    """In words, which facts differ, and on which ranks they are not as on most."""
    names = dict.fromkeys(name for facts in told for name in facts)
    found = []
    for name in names:
        holders: dict[str | None, list[int]] = defaultdict(list)
        for rank, facts in enumerate(told):
            holders[facts.get(name)].append(rank)
        most = max(holders.values(), key=len)
        for value, holding in holders.items():
            if holding is not most:
                usual = told[most[0]].get(name)
                found.append(
                    f"{name} is {_short(value)} on {_ranks(holding)}, {_short(usual)} on {_ranks(most)}"
                )
    return "; ".join(found)


def _ranks(ranks: Sequence[int]) -> str:
    names = ", ".join(map(str, ranks[:NAMED])) + (
        f" and {len(ranks) - NAMED} more" if len(ranks) > NAMED else ""
    )
    return f"rank {names}" if len(ranks) == 1 else f"ranks {names}"


def _short(value: str | None) -> str:
    if value is None:
        return "missing"
    return value if len(value) <= 80 else f"{value[:77]}..."
