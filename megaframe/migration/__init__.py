"""Reads the settings of other trainers, and writes them as a config of megaframe."""
