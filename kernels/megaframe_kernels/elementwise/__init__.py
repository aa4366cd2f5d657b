"""Norms, activations and rotary positions."""
