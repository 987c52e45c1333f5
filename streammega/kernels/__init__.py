"""numba kernels: arrays in, arrays out. Compiled once per machine (cached on disk), without the GIL.

No kernel uses numba's own threads: their pools survive neither a fork nor calls from several threads.
Kernels that run in parallel are driven by `parallel.map_in_threads` over independent chunks.
"""
