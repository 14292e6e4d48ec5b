"""Optimizers that hold their state once over all ranks."""
