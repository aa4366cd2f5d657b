"""What a model is made of, without torch: matrices, experts, windows, division into stages."""
