"""Layers whose matrices and rows are divided over the tensor ranks."""
