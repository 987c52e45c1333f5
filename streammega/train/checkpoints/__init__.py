"""The checkpoints of a run.

checkpointer.py  what the loop uses: saves in the background, publishes, removes old ones
resume.py        a start: which checkpoint is taken, and how it is loaded
state.py         what a checkpoint holds, by name, on any layout
staging.py       copies of the state on the host, while training goes on
writer.py        tensors to files         reader.py  files to tensors
integrity.py     what the files hold, whether they are whole, their checksums, and failures
store.py         where checkpoints are, what makes one whole, and whether all ranks see it
lock.py          one job to a store
"""
