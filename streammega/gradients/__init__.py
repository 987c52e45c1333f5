"""Gradients in buckets, reduced while backward goes on: for training loops of one's own."""
