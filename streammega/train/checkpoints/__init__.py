"""The checkpoints of a run.

checkpointer.py  what the loop uses: saves in the background, resumes from the newest sound one
store.py         how a checkpoint becomes visible, on a disk and in a bucket, and which ones are kept
state.py         what a checkpoint holds, by name, on any layout
staging.py       copies of the state on the host, while training goes on
files.py         the files of one checkpoint, written and read through any store
integrity.py     checksums, and metadata that is read without trust
export.py        a checkpoint as one file of safetensors or torch
out_dir.py       one job at a time in a folder, which all its ranks see
"""
