"""Causal self-attention with grouped key and value heads.

Shape legend: B samples, S positions, G key/value heads (groups), R query heads per group, N = G * R
query heads, D width of a head, V width of a value head where that may differ.
"""

from __future__ import annotations

from torch import Tensor

from megaframe.architecture.attention import AttentionDescription
from megaframe.architecture.cross_layer_tensors import name_keys
from megaframe.context_parallel.ring import ring_attention
from megaframe.context_parallel.ring_mask import RingMask
from megaframe.model.alibi import Alibi
from megaframe.model.key_value_cache import LayerCache
from megaframe.model.layer_inputs import LayerSetup, MicrobatchInputs
from megaframe.model.pass_state import PassState
from megaframe.model.query_key_norm import divide_by_size, make_query_key_norms
from megaframe.ops.attention_kernel import attend_by_kernel
from megaframe.ops.attention_mask import SequenceMask
from megaframe.ops.attention_tiles import add_sinks, attend
from megaframe.parameters.parameter import Module, Parameter
from megaframe.tensor_parallel.linear import Elementwise, Linear


class Attention(Module):
    """Self-attention of one layer, with grouped key and value heads.

    Attributes:
        names: Of the keys and the values, if several layers attend to them.
    """

    computes_keys = True
    """Whether it makes keys and values itself."""

    def __init__(self, name: str, description: AttentionDescription, setup: LayerSetup) -> None:
        """Make the layers.

        Args:
            name: Of the layer in the model.
            description: What it declares.
            setup: What the run fixes.
        """
        self.window, self.scale, self.setup = description.window, description.score_scale, setup
        self.softcap, self.rotary = description.softcap, description.rotary
        self.query_scale = description.query_scale
        self.groups, self.width = description.kv_heads, description.head_dim
        self.per_group, self.group_widths = description.heads_per_group, description.group_widths
        self.names: tuple[str, ...] = ()
        if description.hands_keys:
            self.names = name_keys(name.rpartition(".")[0])
        self._make_products(name, description, setup)
        self.norm_after_rotation = description.norm_after_rotation
        self.value_eps = description.norm_eps if description.value_norm else None
        self.keys_as_values = description.keys_as_values
        self.sinks: Parameter | None = None
        if description.sinks is not None:
            (spec,) = description.sinks.declare_parameters(f"{name}.sinks")
            self.sinks = Parameter(spec)
        self.alibi: Alibi | None = None
        if description.alibi is not None:
            self.alibi = Alibi(description, setup.tensor.group)
        gate = description.gate
        self.gate = None if gate is None else Linear(f"{name}.gate", gate, setup.tensor)
        self.output = Linear(f"{name}.output", description.output, setup.tensor)

    def _make_products(
        self, name: str, description: AttentionDescription, setup: LayerSetup
    ) -> None:
        """Make what queries, keys and values come from."""
        self.qkv = Linear(f"{name}.qkv", description.qkv, setup.tensor)
        self.qk_norms = make_query_key_norms(name, description, setup)

    def __call__(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> Tensor:
        """Attend within samples. On a tensor axis each rank computes some of the groups, for all
        tokens.

        Args:
            x: This rank's rows, [rows, hidden].
            norm: Applied to x first, and again in the backward pass of each product of x; None if
                it already was, as without recomputation.
            inputs: Of the microbatch.
            state: Of its pass.

        Returns:
            A tensor like x.
        """
        query_BSND, key_BSGD, value_BSGD = self._compute_heads(x, norm, inputs, state)
        mask = inputs.masks[self.window]
        heads_TV = attend_heads(
            query_BSND,
            key_BSGD,
            value_BSGD,
            mask,
            self.scale,
            self.setup,
            softcap=self.softcap,
            sinks_N=None if self.sinks is None else self.sinks.use(),
            cache=state.find_cache(self.names or self, self.window),
            extends_cache=self.computes_keys,
            query_scale=inputs.find_query_scale(self.query_scale),
        )
        if self.gate is not None:
            gates_TN1 = inputs.rows.remove_padding(self.gate(x, state.deferred, norm)).sigmoid()
            gates_TN1 = gates_TN1.view(len(heads_TV), query_BSND.shape[2], -1)
            heads_TV = (heads_TV.view(*gates_TN1.shape[:2], -1) * gates_TN1).flatten(1)
        # The product of a row linear is reduce-scattered in equal parts, so the padding comes back.
        return self.output(inputs.rows.pad(heads_TV), state.deferred)

    def _compute_heads(
        self, x: Tensor, norm: Elementwise | None, inputs: MicrobatchInputs, state: PassState
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's queries [B, S, N, D], keys [B, S, G, D] and values [B, S, G, V]. The
        arguments are those of a call."""
        qkv = inputs.rows.remove_padding(self.qkv(x, state.deferred, norm))
        qkv = qkv.view(inputs.batch, inputs.length, -1, sum(self.group_widths))
        query, key, value = self._divide(qkv, inputs)
        for name, tensor in zip(self.names, (key, value), strict=False):
            state.handed.hand_on(name, tensor)
        return query, key, value

    def _divide(self, qkv: Tensor, inputs: MicrobatchInputs) -> tuple[Tensor, Tensor, Tensor]:
        """Return this rank's queries [B, S, N, D] and keys [B, S, G, D], normalised and rotated,
        and values [B, S, G, V].

        Args:
            qkv: [B, S, G, R D + D + V]: for each of the rank's groups R queries, a key and a value,
                which has no width here if it is the key.
            inputs: Of the microbatch.
        """
        tensor, norms = self.setup.tensor.group, self.qk_norms
        rotate = None if self.rotary is None else inputs.rotary[self.rotary]
        # Neighbouring ranks share a group if there are fewer; each has some of its query heads.
        sharing = max(1, tensor.size // self.groups)
        # The order matters: the gains of two dims that are rotated against each other differ.
        before, after = (None, norms) if self.norm_after_rotation else (norms, None)
        same = self.group_widths[2] == self.width
        plain = before is None and self.value_eps is None
        if rotate is not None and plain and sharing == 1 and same:
            query, key, value = rotate.divide(qkv.unflatten(3, (-1, self.width)))
        else:
            query, key, value = qkv.split(self.group_widths, 3)
            if sharing > 1:
                query = query.chunk(sharing, 3)[tensor.index % sharing]
            # Query heads of one group stay adjacent, as grouped-query attention expects them.
            query = query.unflatten(3, (-1, self.width)).flatten(2, 3)
            value = key if self.keys_as_values else value
            if self.value_eps is not None:
                value = divide_by_size(value, self.value_eps)
            if before is not None:
                query, key = before(query, key)
            if rotate is not None:
                query, key = rotate(query), rotate(key)
            if rotate is not None or self.alibi is not None:
                # A copy, because a view would keep the unrotated queries and keys alive beside it.
                value = value.contiguous()
        if after is not None:
            query, key = after(query, key)
        if self.alibi is not None:
            query, key = self.alibi(query, key, inputs.positions_BS)
        return query, key, value


def attend_heads(
    query_BSND: Tensor,
    key_BSGD: Tensor,
    value_BSGV: Tensor,
    mask: SequenceMask | RingMask,
    scale: float,
    setup: LayerSetup,
    *,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
    cache: LayerCache | None = None,
    extends_cache: bool = True,
    query_scale: Tensor | None = None,
) -> Tensor:
    """Compute this tensor rank's heads for this context rank's tokens, which attend to those of the
    same sample on other context ranks too.

    Args:
        query_BSND: Queries.
        key_BSGD: Keys.
        value_BSGV: Values.
        mask: What tokens attend to.
        scale: Factor of the scores.
        setup: Its context ranks exchange heads or pass keys and values around.
        softcap: Bound of the scores; None for no bound.
        sinks_N: A logit without a value in the softmax of each of this tensor rank's query heads;
            None for none.
        cache: Gets the keys and values. If it has others already, the queries are of the token
            after them, of each sample; None where all tokens of a sample are here.
        extends_cache: Whether it does, and not an earlier layer with the same keys and values.
        query_scale: Factor of each token's queries, [S, 1, 1] or [B, S, 1, 1]; None for none.

    Returns:
        The outputs of the heads, [B * S, N * V].
    """
    if query_scale is not None:
        query_BSND = query_BSND * query_scale
    if cache is not None:
        if extends_cache:
            cache.extend(key_BSGD, value_BSGV)
        if cache.length > key_BSGD.shape[1]:
            (keys, values), seen = cache.see()
            return attend_to_past(query_BSND, keys, values, seen, scale, softcap, sinks_N)
    # The two ways of context parallelism nest: heads are exchanged within a group of neighbours,
    # and the ring passes keys around between groups.
    shared = setup.context.scatter_heads(query_BSND, key_BSGD, value_BSGV)
    if sinks_N is not None and setup.context.heads.size > 1:
        # Those of the heads that the exchange brings to this rank.
        sinks_N = sinks_N.chunk(setup.context.heads.size)[setup.context.heads.index]
    if isinstance(mask, RingMask):
        out_BSNV = ring_attention(*shared, mask, scale, softcap, sinks_N)
    else:
        by_kernel = attend_by_kernel(setup.kernels, *shared, mask, scale, softcap, sinks_N)
        if by_kernel is None:
            out_BSNV = setup.routines.attend_locally(*shared, mask, scale, softcap, sinks_N)
        else:
            out_BSNV = by_kernel
    out_BSNV = setup.context.gather_heads(out_BSNV)
    return out_BSNV.reshape(out_BSNV.shape[0] * out_BSNV.shape[1], -1)


def attend_to_past(
    query_B1ND: Tensor,
    key_BTGD: Tensor,
    value_BTGV: Tensor,
    seen: Tensor | None,
    scale: float,
    softcap: float | None = None,
    sinks_N: Tensor | None = None,
) -> Tensor:
    """Compute the outputs of one token of each sample for all that it sees, [B, N * V].

    Args:
        query_B1ND: Its queries.
        key_BTGD: The keys so far.
        value_BTGV: The values so far.
        seen: Which of them it sees, bool [B, 1, 1, T]; None for all.
        scale: Factor of the scores.
        softcap: Bound of the scores; None for no bound.
        sinks_N: As in `attend_heads`.
    """
    assert query_B1ND.shape[1] == 1, "after the first pass tokens come one by one"
    out_B1NV, lse_BN1 = attend(
        query_B1ND, key_BTGD, value_BTGV, seen, causal=False, scale=scale, softcap=softcap
    )
    if sinks_N is not None:
        out_B1NV = out_B1NV.contiguous()
        add_sinks(out_B1NV, lse_BN1, sinks_N)
    return out_B1NV.reshape(len(out_B1NV), -1)
