"""numba kernels: arrays in, arrays out. Compiled once per machine (cached on disk), without the
GIL.

No kernel uses numba's own threads: their pools survive neither a fork nor calls from several
threads. What runs in parallel runs independent chunks on Python threads.
"""
