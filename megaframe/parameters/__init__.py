"""Parameters: their specs, their memory, their initial values, and the modules that own them."""
