"""Gradients in buckets, reduced while backward goes on, and the sharded optimizer: for training
loops of one's own.
"""
