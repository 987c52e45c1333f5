"""From runs of tokens to the fields of a batch."""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel


@kernel
def gather_runs(source, source_starts, sizes, out, out_starts) -> None:  # type: ignore[no-untyped-def]  # pragma: no cover
    """out[out_starts[i] : +sizes[i]] = source[source_starts[i] : +sizes[i]] for each i, widening where dtypes differ.

    All in tokens. Cost: one copy. The caller has checked that every run lies inside both arrays.
    """
    for i in range(len(sizes)):
        a, b, n = source_starts[i], out_starts[i], sizes[i]
        for k in range(n):
            out[b + k] = source[a + k]


@kernel
def make_fields(  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    ids, valid, extra, pad, eod, mask_eod, reset_positions, tokens, labels, loss_mask, position_ids
) -> None:
    """Fill the four fields of a batch in one pass.

    ids [samples, S + extra] in their stored dtype, of which row r holds valid[r] tokens and then padding;
    tokens, labels, position_ids int64 and loss_mask float32, all [samples, S]. `eod` below zero: there is none.
    Labels are the next tokens (padding after the last). The mask is zero where the label is padding and, with
    `mask_eod`, where the token is `eod`; padding then reads 0. Positions restart after every `eod` on request.
    """
    samples, length = tokens.shape
    for r in range(samples):
        position = 0
        have = valid[r]
        for c in range(length):
            x = np.int64(ids[r, c]) if c < have else pad
            y = np.int64(ids[r, c + 1]) if c + 1 < have and c + 1 < length + extra else pad
            masked = y == pad or (mask_eod and x == eod)
            loss_mask[r, c] = np.float32(0.0) if masked else np.float32(1.0)
            tokens[r, c] = 0 if x == pad else x
            labels[r, c] = 0 if y == pad else y
            position_ids[r, c] = position
            position = 0 if reset_positions and x == eod else position + 1


@kernel
def coalesce_sorted(starts, stops, gap, largest):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """(low, high, request of each run) for runs sorted by start; the rule is that of `samples.fetch.coalesce`."""
    low, high = np.empty(len(starts), np.int64), np.empty(len(starts), np.int64)
    request = np.empty(len(starts), np.int64)
    last = -1
    for i in range(len(starts)):
        if last < 0 or starts[i] > high[last] + gap or max(stops[i], high[last]) - low[last] > largest:
            last += 1
            low[last], high[last] = starts[i], stops[i]
        high[last] = max(high[last], stops[i])
        request[i] = last
    return low[: last + 1], high[: last + 1], request


@kernel
def document_bounds(tokens, eod, bounds):  # type: ignore[no-untyped-def]  # pragma: no cover - compiled
    """Fill bounds int32 [samples, S + 1] with the starts of documents in tokens [samples, S]; returns the most of any row.

    A document begins at 0 and after every `eod`; the rest of a row is S, which is also the end of its last document.
    """
    samples, length = tokens.shape
    most = 1
    for r in range(samples):
        count = 1
        bounds[r, :] = length
        bounds[r, 0] = 0
        for c in range(length - 1):
            if tokens[r, c] == eod:
                bounds[r, count] = c + 1
                count += 1
        most = max(most, count)
    return most
