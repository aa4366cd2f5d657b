"""Recurrent mixers: the gated delta rule, and the state space of Mamba-2."""
