"""8-bit numbers: quantization, and grouped products of experts."""
