"""A store for each way to reach bytes."""
