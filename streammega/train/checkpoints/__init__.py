"""The checkpoints of a run.

checkpointer.py  what the loop uses: saves in the background, keeps the last ones, resumes
state.py         what a checkpoint holds, by name, on any layout
staging.py       copies of the state on the host, while training goes on
files.py         the files of one checkpoint, written and read through any store
integrity.py     checksums, and metadata that is read without trust
store.py         where checkpoints are, what makes one whole, and whether all ranks see it
"""
