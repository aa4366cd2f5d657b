"""Pipeline stages, and the executor of their schedule."""
