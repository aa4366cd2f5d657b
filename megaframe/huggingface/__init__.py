"""Converts models to and from the format of Hugging Face transformers: configs, tensors,
folders."""
