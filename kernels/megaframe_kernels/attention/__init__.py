"""Attention: reference, forward and backward pass, and the spans of keys that queries see."""
