"""Attention to the keys and values of an earlier layer."""

from __future__ import annotations

from torch import Tensor

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.cross_layer_tensors import name_keys
from megaframe.architecture.shared_keys import SharedKeyAttentionDescription
from megaframe.model.attention import Attention
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.norm import Norm
from megaframe.model.pass_state import PassState
from megaframe.tensor_parallel.linear import Elementwise, Linear


class SharedKeyAttention(Attention):
    """Self-attention of one layer that computes queries alone."""

    computes_keys = False

    def _make_products(
        self, name: str, description: AttentionDescription, setup: LayerSetup
    ) -> None:
        assert isinstance(description, SharedKeyAttentionDescription), "it has no keys of its own"
        self.query = Linear(f"{name}.query", description.query, setup.tensor)
        norm = description.qk_norms.get("query_norm")
        self.query_norm = None if norm is None else Norm(f"{name}.query_norm", norm)
        self.names = name_keys(f"blocks.{description.source}")

    def _compute_heads(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = inputs.rows.remove_padding(self.query(x, state.deferred, norm))
        query = rows.view(inputs.batch, inputs.length, -1, self.width)
        rotate = None if self.rotary is None else inputs.rotary[self.rotary]
        if self.query_norm is not None and not self.norm_after_rotation:
            query = self.query_norm(query, self.setup.kernels)
        query = query if rotate is None else rotate(query)
        if self.query_norm is not None and self.norm_after_rotation:
            query = self.query_norm(query, self.setup.kernels)
        key, value = map(state.handed.take, self.names)
        return query, key, value
