"""Where checkpoints are stored: local folders, object stores, the memory of peers."""
