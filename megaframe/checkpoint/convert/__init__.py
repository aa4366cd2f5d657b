"""Checkpoints of other programs: export and import."""
