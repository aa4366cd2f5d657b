"""The update of the optimizer and the sum of squares for gradient norms."""
