"""Mixture of experts: the router, the experts, and the layer made of both."""
