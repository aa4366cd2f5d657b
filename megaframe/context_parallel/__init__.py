"""Division of samples over the context ranks: ring attention and all-to-all."""
