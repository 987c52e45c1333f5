"""What was fetched, kept on a local disk for all processes and runs of a node. `storage.page_cache` is its front.

`layout`: the files of a cache folder. `room`: how much is taken, and what makes way. `presence`: which objects a process uses,
and which pages it fetches. `chunk`: one file, mapped. `pages`: reading through the pages of an object. `inspect`: what the
command line shows.
"""
