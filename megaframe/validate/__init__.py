"""Checks of a config that no section can make alone, all made before anything is built."""
