"""Trained weights in use: evaluation, scores of tasks, generation, and the model of the library."""
