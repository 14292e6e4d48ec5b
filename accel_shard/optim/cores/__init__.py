"""The mathematics of the matrix optimizers, on batches of whole blocks."""
