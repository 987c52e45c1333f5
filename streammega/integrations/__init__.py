"""In the trainers people already run: each module imports its framework only when it is used."""
