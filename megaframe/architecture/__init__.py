"""What a model is made of, without torch: matrices, experts, windows, and the division into
stages."""
