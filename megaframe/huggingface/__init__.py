"""Models in the format of Hugging Face transformers: their configs, tensors and folders."""
