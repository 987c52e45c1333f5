"""Where bytes lie: a store for each kind of place."""
