"""Dispatch of tokens to the ranks that hold their experts, and the way back."""
