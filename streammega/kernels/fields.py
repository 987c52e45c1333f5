"""From runs of tokens to the fields of a batch."""

from __future__ import annotations

import numpy as np

from streammega.kernels.jit import kernel

MIN_MODE = -128
"""The smallest int8: tables of modes begin with it."""
_FAR = np.int64(1 << 62)
"""Beyond every token id."""


@kernel
def fill_fields(ids, starts, tokens, labels, mask, positions) -> None:
    """The fields of whole samples: tokens, labels and positions int64, mask float32, [rows, S].

    tokens are the ids of each row, labels those one place later as far as there are any, masks 1, and
    positions count from the starts, int64 [parts], of the rows in turn. Fields that are not wanted have
    no rows. One call makes all of them: each return from a kernel waits for the GIL, which other threads
    want too.
    """
    for r in range(len(tokens)):
        row = ids[r]
        token = tokens[r]
        for c in range(len(token)):
            token[c] = row[c]
    for r in range(len(labels)):
        row = ids[r, 1:]
        label = labels[r]
        for c in range(min(len(label), len(row))):
            label[c] = row[c]
    for r in range(len(mask)):
        ones = mask[r]
        for c in range(len(ones)):
            ones[c] = np.float32(1.0)
    for r in range(len(positions)):
        position = positions[r]
        first = starts[r % len(starts)]
        for c in range(len(position)):
            position[c] = first + c


@kernel
def fill_tails(ids, valid, pad) -> None:
    """Write `pad` after the valid[r] ids of each row of ids [samples, width]."""
    samples, width = ids.shape
    for r in range(samples):
        for c in range(valid[r], width):
            ids[r, c] = pad


@kernel
def scan_ids(ids, pad):
    """(how many ids are `pad`, the least and the greatest of the others); 0 and 0 when there is
    none.
    """
    padding = np.int64(0)
    low = _FAR
    high = -_FAR
    for r in range(len(ids)):
        row = ids[r]
        for c in range(len(row)):
            token = row[c]
            is_pad = token == pad
            padding += np.int64(is_pad)
            # both sides of a choice, rather than a branch, are what is vectorised
            low = low if is_pad else min(low, token)
            high = high if is_pad else max(high, token)
    if low > high:
        low = np.int64(0)
        high = np.int64(0)
    return padding, low, high


@kernel
def is_widened(ids, tokens, labels):
    """Whether tokens and labels, int64 [samples, S], are what `fill_fields` makes of ids [samples, S + 1]."""
    for r in range(len(tokens)):
        row = ids[r]
        token = tokens[r]
        label = labels[r]
        different = token[0] - token[0]
        for c in range(len(token)):
            different |= (token[c] ^ np.int64(row[c])) | (label[c] ^ np.int64(row[c + 1]))
        if different != 0:
            return False
    return True


@kernel
def zero_padding(ids, pad) -> None:
    """Replace `pad` by 0 in ids [samples, width]: what the model reads there has no loss."""
    for r in range(len(ids)):
        row = ids[r]
        for c in range(len(row)):
            row[c] = 0 if row[c] == pad else row[c]


@kernel
def make_mask(tokens, labels, pad, eod, mask_eod, mask) -> None:
    """mask float32 [samples, S]: 0 where the label is `pad` and, with `mask_eod`, where the token
    is `eod`.

    tokens, labels: int64 [samples, S].
    """
    for r in range(len(mask)):
        row = mask[r]
        token = tokens[r]
        label = labels[r]
        for c in range(len(row)):
            masked = label[c] == pad or (mask_eod and token[c] == eod)
            row[c] = np.float32(0.0) if masked else np.float32(1.0)


@kernel
def clear_by_mode(offsets, modes, has_loss, itemsize, start, size, sample, sample_start, out):
    """Write 0 to `out` for tokens of one file whose sequences have no loss.

    offsets (bytes, rising), modes [sequences]; has_loss [256]: of mode m at m - MIN_MODE.
    Row r is tokens [start[r], start[r] + size[r]) of the file, and begins at sample_start[r] of
    out[sample[r]]; columns outside of `out` are ignored. Cost: a binary search for each row,
    then one step for each sequence in it.
    """
    width = out.shape[1]
    for r in range(len(start)):
        token = start[r]
        end = start[r] + size[r]
        start_of_file = sample_start[r] - start[r]
        sequence = max(np.searchsorted(offsets, token * itemsize, "right") - 1, 0)
        while token < end:
            stop = end
            if sequence + 1 < len(offsets):
                stop = min(end, offsets[sequence + 1] // itemsize)
            if not has_loss[modes[sequence] - MIN_MODE]:
                first_column = max(start_of_file + token, 0)
                for c in range(first_column, min(start_of_file + stop, width)):
                    out[sample[r], c] = 0
            token = max(token, stop)
            sequence += 1


@kernel
def make_positions(tokens, eod, positions) -> None:
    """positions int64 [samples, S]: counted from 0, and from 0 again after every `eod` of tokens [samples,
    S].
    """
    samples, length = positions.shape
    for r in range(samples):
        position = 0
        for c in range(length):
            positions[r, c] = position
            position = 0 if tokens[r, c] == eod else position + 1


@kernel
def forbid(bounds, mask) -> None:
    """mask bool [samples, S, S]: True where row r, a token, may not attend to column c: later ones
    and other documents.

    bounds: int32 [samples, n], where the documents of each sample begin, from 0 on, filled up with
    S.
    """
    for s in range(len(mask)):
        first = 0  # where the document of token r begins
        following = 1  # the document after that
        for r in range(mask.shape[1]):
            while following < bounds.shape[1] and bounds[s, following] <= r:
                first = bounds[s, following]
                following = following + 1
            row = mask[s, r]
            # three loops without a condition: each is vectorised
            for c in range(first):
                row[c] = True
            for c in range(first, r + 1):
                row[c] = False
            for c in range(r + 1, len(row)):
                row[c] = True


@kernel
def sequence_bounds(row_splits, size, extra, bounds, longest, positions) -> None:
    """Bounds of the sequences that samples are made of, in Megatron's form.

    Row r is a piece of a sequence, of size[r] tokens, which may be none; sample i is rows
    [row_splits[i], row_splits[i + 1]) end to end. `extra`: 1 if samples carry one token more than
    S. Fills bounds int32 [samples, S + 1], from 0 to S and filled up with S; longest int32
    [samples], tokens between two of them at most; positions int64 [samples, S], counted from each.
    Padding belongs to the last sequence. Cost: a step a row and one a token.
    """
    samples, length = positions.shape
    for i in range(samples):
        first = row_splits[i]
        end = row_splits[i + 1]
        if extra == 1 and end > first and size[end - 1] == 1:
            end -= 1  # of the last sequence it has the extra token alone, which only is a label
        # Megatron fails where a sample has more pieces than tokens: there empty ones are left out
        with_empty = end - first <= length
        count = 1
        column = np.int64(0)
        bounds[i, 0] = 0
        for r in range(first + 1, end):
            column += size[r - 1]
            if with_empty or bounds[i, count - 1] < column < length:
                bounds[i, count] = column
                count += 1
        bounds[i, count:] = length
        longest_here = np.int32(0)
        for b in range(count):
            low = bounds[i, b]
            high = bounds[i, b + 1]
            longest_here = max(longest_here, high - low)
            for c in range(low, high):
                positions[i, c] = c - low
        longest[i] = longest_here


@kernel
def document_bounds(tokens, eod, bounds):
    """Fill bounds int32 [samples, S + 1] with the starts of documents in tokens [samples, S];
    returns the largest number in any row.

    A document begins at 0 and after every `eod`; the rest of a row is S, which is also the end of
    its last document.
    """
    samples, length = tokens.shape
    max_count = 1
    for r in range(samples):
        count = 1
        bounds[r, :] = length
        bounds[r, 0] = 0
        for c in range(length - 1):
            if tokens[r, c] == eod:
                bounds[r, count] = c + 1
                count += 1
        max_count = max(max_count, count)
    return max_count


FILE_STRIDE = 1 << 44
"""Tokens from one file to the next where all are laid end to end. No file has as many, and there is
room for half a million files: `samples/excluded.py` asks both.
"""


@kernel
def find_excluded(starts, stops, since, file, start, size, sample_start, row, sample, ranges):
    """Columns of samples that hold tokens of excluded stretches; returns how many stretches of them
    there are.

    starts, stops (rising, disjoint), since [stretches]: tokens [starts[n], stops[n]) of all files,
    FILE_STRIDE apart, are excluded in samples since[n] and later. Run r, of each a value: tokens
    [start, start + size) of a file are those from sample_start on of a row; the row is the sample of
    that number. Fills ranges int64 [3, room]: the row, its first column, and the one behind the last,
    as far as there is room. Cost: a binary search for each run, then one step for each stretch in
    it.
    """
    room = ranges.shape[1]
    count = 0
    for r in range(len(file)):
        if not size[r]:
            continue  # an empty run may be within a stretch, and takes nothing of it into the sample
        begin = file[r] * FILE_STRIDE + start[r]
        end = begin + size[r]
        first_column = sample_start[r] - begin
        n = np.searchsorted(stops, begin, "right")
        while n < len(starts) and starts[n] < end:
            if since[n] <= sample[r]:
                if count < room:
                    ranges[0, count] = row[r]
                    ranges[1, count] = first_column + max(starts[n], begin)
                    ranges[2, count] = first_column + min(stops[n], end)
                count += 1
            n += 1
    return count


@kernel
def fill_ranges(ranges, before, behind, value, out) -> None:
    """Write `value` to out [rows, width] in columns [low - before, high + behind) of each row that
    `find_excluded` has filled in; columns outside of `out` are ignored.
    """
    width = out.shape[1]
    for k in range(ranges.shape[1]):
        low = max(ranges[1, k] - before, 0)
        high = min(ranges[2, k] + behind, width)
        for c in range(low, high):
            out[ranges[0, k], c] = value
