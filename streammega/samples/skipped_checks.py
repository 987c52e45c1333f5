"""What files must be like for documents of them to be skipped."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain

import numpy as np
from numpy.typing import NDArray

from streammega.errors import ConfigError
from streammega.kernels.skipping import FILE_STRIDE
from streammega.samples.token_file import TokenFile

MOST_FILES = (1 << 63) // FILE_STRIDE
"""Files whose tokens, laid FILE_STRIDE apart, have numbers that are int64."""


def check_room(files: Sequence[Sequence[TokenFile]]) -> None:
    """Raise ConfigError for more files, or longer ones, than there are numbers of tokens for.

    files: of each dataset.
    """
    count = sum(map(len, files))
    if count > MOST_FILES:
        raise ConfigError(
            f"skip_documents: the blend has {count:,} files, and documents are skipped in at most "
            f"{MOST_FILES:,}; merge shards into larger ones (streammega convert PREFIX OUT --shard-size 4G), "
            "or leave skip_documents out"
        )
    for file in chain.from_iterable(files):
        # a stretch up to the last number would touch the next file's first one
        if file.num_tokens >= FILE_STRIDE:
            raise ConfigError(
                f"skip_documents: {file.url}: has {file.num_tokens:,} tokens, and documents are skipped "
                f"in files of less than {FILE_STRIDE:,}; write it in smaller shards (streammega convert "
                "PREFIX OUT --shard-size 4G); in the Megatron order, which joins those of a dataset, name "
                "each in the blend"
            )


def check_ids(
    starts: Sequence[NDArray[np.int64]], files: Sequence[Sequence[TokenFile]], eod_id: int
) -> None:
    """Raise ConfigError where eod_id is no id of a file that has tokens to be skipped.

    starts: the first tokens of what is skipped, of each list.
    """
    all_files = [file for of_dataset in files for file in of_dataset]
    used = np.unique(np.concatenate(starts) // FILE_STRIDE)
    for number in used.tolist():
        file = all_files[number]
        if eod_id > np.iinfo(file.dtype).max:
            raise ConfigError(
                f"{file.url}: stores ids as {file.dtype}, which eod_id {eod_id} is not, so it "
                "cannot stand for documents that are skipped; is it the tokenizer's?"
            )
