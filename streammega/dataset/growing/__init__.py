"""Datasets that grow while runs train on them: versions, each a manifest of its own.

    web.manifest.json             what convert wrote: version 0, where there is one
    web.v00000001.manifest.json   its shards, and those of what was appended first
    web.v00000002.manifest.json   those of version 1, and more

A version is written on the condition that none of its number is there, whole, and never again. So
producers need no coordinator: of two at the same moment one is refused, looks again, and appends to
the version of the other. Shards of a version come first in the next one, in the same order. What a
killed producer leaves is a dataset that no version lists: it may be appended later.

A run names the version that it reads, `web@2`, and goes on with it whatever is appended. `web@2..5`
is what was appended between the two: a phase that draws from it beside `web@2` reads nothing twice.

    numbers.py    what versions are called, and which earlier one each builds on
    names.py      what `web@2` and `web@2..5` stand for
    append.py     the next version, by any number of producers at once
    additions.py  what is appended: whether it is what it says, and one dataset with the rest
    versions.py   which versions there are, and what is in none of them
    checks.py     what may not be replaced

How a version is stored, and read, is `dataset/manifest.py`.
"""
