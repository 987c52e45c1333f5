"""Origins on their way to a shard: a file beside each segment, and of these the file beside the
shard.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import xxhash

from streammega.convert.job import Job
from streammega.convert.write.document_order import Integers, OrderedDocuments
from streammega.dataset.provenance import (
    ENDING,
    DocumentOrigins,
    ProvenanceWriter,
    concat_origins,
    open_provenance,
)
from streammega.errors import ConvertError
from streammega.storage import join_url, save_bytes


def save_origins(job: Job, name: str, origins: DocumentOrigins | None, documents: int) -> None:
    """Write those of a segment's documents beside it, if they are kept. Raises ConvertError where
    they are not of as many: each would be told of another one's.
    """
    if not job.options.origins:
        return
    if origins is None or len(origins) != documents:
        known = 0 if origins is None else len(origins)
        raise ConvertError(
            f"{name}: where {documents} documents came from is known of {known}; convert without "
            "--origins, and report this"
        )
    writer = ProvenanceWriter()
    writer.add(origins)
    save_bytes(join_url(job.work, name + ENDING), writer.finish(), job.storage)


def write_origins(
    job: Job,
    documents: OrderedDocuments,
    portions: Iterable[tuple[Integers, Integers]],
    name: str,
) -> tuple[str, int]:
    """Write the origins of a shard to the work folder, from where they are published; returns their
    xxh3-128, and how many of them have an id. portions: (part, document of it) of its documents, in
    their order.
    """
    writer = ProvenanceWriter()
    for parts, chosen in portions:
        writer.add(_chosen(job, documents, parts, chosen))
    stored = writer.finish()
    save_bytes(join_url(job.work, f"out/{name}{ENDING}"), stored, job.storage)
    return xxhash.xxh3_128_hexdigest(stored), writer.num_ids


def _chosen(
    job: Job, documents: OrderedDocuments, parts: Integers, chosen: Integers
) -> DocumentOrigins:
    """The origins of documents of some parts, in the order asked."""
    found = []
    rows = []
    for part in np.unique(parts):
        of_part = np.flatnonzero(parts == part)
        prefix = documents.name(int(part))
        stored = open_provenance(prefix, job.storage)
        if stored is None:
            raise ConvertError(
                f"{prefix}{ENDING}: is gone; run the same command again with --restart"
            )
        first = int(chosen[of_part].min())
        stretch = stored.between(first, int(chosen[of_part].max()) + 1)
        found.append(stretch.take(chosen[of_part] - first))
        rows.append(of_part)
    in_order = np.argsort(np.concatenate(rows))
    return concat_origins(found).take(in_order)
