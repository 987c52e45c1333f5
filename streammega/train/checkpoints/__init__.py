"""The checkpoints of a run.

checkpoints.py   what the loop uses: saves in the background, and one hold on the store
publish.py       a save: all ranks write, the first one publishes, old ones go
resume.py        a start: which checkpoint is taken, and how it is loaded
state.py         what a checkpoint holds, by name, on any layout
chunks.py        how torch's checkpoints write and read that
host_copies.py   the values of a save, taken off the device
writer.py        tensors to files         reader.py  files to tensors
files.py         what the files hold, whether they are whole, and their checksums
store.py         where checkpoints are, and what makes one whole
shared_store.py  whether all ranks see one store, and how long that may take
hold.py          one job to a store
"""
