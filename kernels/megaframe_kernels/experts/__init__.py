"""Mixture of experts: router, order and permutation of rows, grouped products."""
