"""Fast functions, each with a slow reference that defines what it computes."""
