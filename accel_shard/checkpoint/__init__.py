"""Snapshots of a run: written by all ranks, committed by one, loaded by any number under any policy."""
