"""Attention to the latents of chosen keys."""
