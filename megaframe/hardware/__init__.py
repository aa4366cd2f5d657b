"""Chips and clusters as data: what they have, and where the figures come from."""
