"""The training loop, and what is built on it: evaluation, generation, dry run."""
