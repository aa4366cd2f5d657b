"""The training loop, dry runs, and the checks of layers."""
