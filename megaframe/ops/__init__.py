"""Computations on one rank without parameters: products, attention, kernels."""
