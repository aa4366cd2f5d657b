"""A GPT in plain torch autograd, written independently of the package, as the reference of its
layers. It takes the package's weights by name and a config, and returns the optimised loss per
valid token.
"""

import math
from functools import partial

import torch
import torch.nn.functional as F
from reference_mixers import MIXERS
from reference_streams import alternate, connect, first_streams, last_streams

from megaframe.architecture.rotary import RotaryDescription
from megaframe.config.blocks import BlockConfig
from megaframe.config.registry import get_part_name
from megaframe.data.microbatch import IGNORE
from megaframe.model.rotary import compute_frequencies


def loss(weights, config, microbatch):
    model = config.model
    tokens = microbatch.tokens_BS
    batch, length = tokens.shape
    positions = microbatch.positions_BS
    if positions is None:
        positions = torch.arange(length).expand(batch, length)
    x = weights["embedding.tokens.weight"][tokens]
    if model.position == "learned":
        x = x + weights["embedding.positions.weight"][positions]
    x = x * model.embedding_scale
    if model.embedding_norm:
        x = _norm(weights, model, "embedding.norm", x, model.norm)
    listed = model.window if isinstance(model.window, tuple) else [model.window]
    if model.blocks is not None:
        every = range(model.layers + model.mtp_depth)
        mixers = [_block_config(model, layer).mixer for layer in every]
        listed = [getattr(mixer, "window", None) for mixer in mixers]
        chunks = [getattr(mixer, "attention_chunk", None) for mixer in mixers]
    else:
        chunks = [None] * len(listed)
    of_layers = zip(listed, chunks, strict=True)
    masks = [_mask(window, chunk, microbatch, batch, length) for window, chunk in of_layers]
    masks *= model.layers + model.mtp_depth  # one per layer, and more than needed
    counted, aside = (microbatch.labels_BS != IGNORE).double(), 0.0
    if microbatch.weights_BS is not None:
        counted = counted * microbatch.weights_BS
    handed = {"inputs": _layer_inputs(weights, model, x, tokens), "tokens": tokens}
    if model.streams is not None:
        x = first_streams(weights, model, x)
    for layer in range(model.layers):
        x, losses = _block(weights, model, layer, x, masks[layer], positions, counted, handed)
        aside = aside + losses
    if model.streams is not None:
        x = last_streams(weights, model, x)
    y = _norm(weights, model, "head.norm", x, model.norm)
    labels = microbatch.labels_BS
    total = _losses(weights, config, y, labels, counted)
    for depth in range(1, model.mtp_depth + 1):
        name = f"predictors.{depth - 1}"
        tokens, labels, of_labels = _further(microbatch, depth)
        embedded = weights["embedding.tokens.weight"][tokens]
        before = _norm(weights, model, f"{name}.stream_norm", y, model.norm)
        ahead = _norm(weights, model, f"{name}.token_norm", embedded, model.norm)
        join = weights[f"{name}.join.weight"]
        x = before @ join[:, 0].T + ahead @ join[:, 1].T
        layer = model.layers + depth - 1
        x, losses = _block(weights, model, layer, x, masks[layer], positions, counted)
        aside = aside + losses
        y = _norm(weights, model, f"{name}.norm", x, model.norm)
        share = config.train.mtp_weight / model.mtp_depth
        total = total + share * _losses(weights, config, y, labels, of_labels)
    return (total + aside) / counted.sum()


def _further(microbatch, depth):
    """Return tokens, labels and their weights `depth` places further ahead, one by one."""
    tokens, labels = (torch.zeros_like(microbatch.tokens_BS) for _ in range(2))
    of_labels, given = torch.ones(tokens.shape, dtype=torch.float64), microbatch.weights_BS
    labels += IGNORE
    documents = microbatch.documents_BS
    batch, length = tokens.shape
    for b in range(batch):
        for place in range(length - depth):
            tokens[b, place] = microbatch.tokens_BS[b, place + depth]
            if given is not None:
                of_labels[b, place] = given[b, place + depth]
            if documents is None or documents[b, place] == documents[b, place + depth]:
                labels[b, place] = microbatch.labels_BS[b, place + depth]
    return tokens, labels, of_labels


def _block(weights, model, layer, x, mask, positions, counted, handed=None):
    """Return the stream after a block, and the losses that its experts add. `handed` has the keys
    and values, or the chosen keys, of the last layer with each window."""

    def compute(stream):
        return _halves(weights, model, layer, stream, mask, positions, counted, handed)

    name = f"blocks.{layer}.streams"
    altup = f"{name}.router.gain" in weights
    x, losses = alternate(weights, model, name, x, compute) if altup else compute(x)
    if handed is not None and handed["inputs"]:
        own = f"blocks.{layer}.layer_embedding"
        row = x[..., 0, :] * weights[f"{name}.scale.gain"] if altup else x
        gates = _gelu_tanh(row @ weights[f"{own}.gate.weight"].T) * handed["inputs"][layer]
        added = gates @ weights[f"{own}.output.weight"].T
        scale = _block_config(model, layer).residual_scale
        added = scale * _norm(weights, model, f"{own}.post_norm", added, model.norm)
        if altup:
            others = [x[..., i, :] + added for i in range(1, x.shape[-2])]
            x = torch.stack([x[..., 0, :], *others], -2)
        else:
            x = x + added
    return x * weights.get(f"blocks.{layer}.layer_scalar.gain", 1.0), losses


def _layer_inputs(weights, model, x, tokens):
    """Return the further inputs of all layers, one after the other (Gemma 4)."""
    if not model.layer_embeddings:
        return []
    width, table = model.layer_embeddings, weights["embedding.layer_tokens.weight"]
    tokens = torch.where(tokens < len(table), tokens, 0)
    parts = []
    for layer in range(model.layers):
        rows = slice(layer * width, (layer + 1) * width)
        matrix = weights["embedding.layer_projection.weight"][rows]
        projected = x @ matrix.T / math.sqrt(model.hidden)
        normed = _norm(weights, model, "embedding.layer_norm", projected, "rmsnorm")
        parts.append((normed + math.sqrt(width) * table[tokens][..., rows]) / math.sqrt(2))
    return parts


def _halves(weights, model, layer, x, mask, positions, counted, handed):
    name, aside = f"blocks.{layer}", []
    block = _block_config(model, layer)
    latent = partial(_latent_attention, counted=counted, aside=aside, handed=handed)
    own = {"attention": partial(_attention, handed=handed), "latent": latent}
    attention = own.get(block.mixer.kind, partial(_mix_by_example, block.mixer.kind))
    before, after = block.norms in ("before", "both"), block.norms in ("after", "both")

    def read(streams, half):
        if model.streams is None or model.streams.kind == "altup":
            return streams, partial(torch.add, streams)
        return connect(weights, model, f"{name}.{half}_streams", streams)

    def add(write, branch, half):
        if after:
            branch = _norm(weights, model, f"{name}.{half}_post_norm", branch, model.norm)
        return write(block.residual_scale * branch)

    stream = x
    if block.mixer.kind != "none":
        z, write = read(x, "attention")
        y = _norm(weights, model, f"{name}.attention_norm", z, model.norm) if before else z
        branch = attention(weights, model, block.mixer, name, y, mask, positions)
        if block.second_mixer.kind != "none":
            mix = own.get(second := block.second_mixer.kind, partial(_mix_by_example, second))
            branch = branch + mix(weights, model, block.second_mixer, name, y, mask, positions)
        stream = add(write, branch, "attention")
        if block.laurel_rank is not None:
            low = y @ weights[f"{name}.laurel.left.weight"].T
            low = low @ weights[f"{name}.laurel.right.weight"].T
            low = _norm(weights, model, f"{name}.laurel.post_norm", low, model.norm)
            stream = (stream + y + low) / math.sqrt(2)
    if block.feed_forward.kind == "none":
        return stream, sum(aside)
    start, write = read(stream, "mlp")
    start = start if block.parallel == "none" else x
    norm = "attention_norm" if block.parallel == "one_norm" else "mlp_norm"
    has_experts = f"{name}.moe.router.weight" in weights
    before = before and not (has_experts and model.moe.own_norms)
    y = _norm(weights, model, f"{name}.{norm}", start, model.norm) if before else start
    if has_experts:
        if getattr(block.feed_forward, "shared", None):
            moe = model.moe.model_copy(update={"shared": block.feed_forward.shared})
            model = model.model_copy(update={"moe": moe})
        branch, losses = _experts(weights, model, name, y, counted, handed and handed["tokens"])
    else:
        branch, losses = _mlp(weights, model, block.feed_forward, name, y), 0.0
    return add(write, branch, "mlp"), losses + sum(aside)


def _block_config(model, layer):
    """Return what `model.blocks` says of a layer; without it, blocks without keys of their own."""
    if model.blocks is None:
        kind = "attention" if model.latent is None else "latent"
        mixer = {"kind": kind} if kind == "latent" else {}
        return BlockConfig(mixer=mixer)
    pattern = [block for block in model.blocks for _ in range(block.repeat)]
    return pattern[layer % len(pattern)]


def _choose(*values):
    """Return the first that is not None."""
    return next(value for value in values if value is not None)


def _losses(weights, config, x, labels, of_labels):
    """Return the loss of a head's input `x`, summed over valid tokens times `of_labels`."""
    model = config.model
    head = weights["embedding.tokens.weight" if model.tie_embeddings else "head.weight"]
    growth = model.hidden / _choose(model.mup_base_hidden, model.hidden)
    logits = x @ head.T / growth + weights.get("head.bias", 0.0)
    if model.logit_softcap:
        logits = model.logit_softcap * torch.tanh(logits / model.logit_softcap)
    valid = labels != IGNORE
    smoothing, z_loss = config.train.label_smoothing, config.train.z_loss
    nll = F.cross_entropy(logits[valid], labels[valid], label_smoothing=smoothing, reduction="none")
    return ((nll + z_loss * torch.logsumexp(logits[valid], -1).square()) * of_labels[valid]).sum()


def _norm(weights, model, name, x, kind):
    gain = weights[f"{name}.gain"]
    if getattr(kind, "name", None) == "dynamic_tanh":
        inner = 2 * weights[f"{name}.slope"] * x
        return gain * (1 - 2 / (1 + torch.exp(inner))) + weights[f"{name}.bias"]
    if kind == "rmsnorm":
        return x / torch.sqrt(x.square().mean(-1, keepdim=True) + model.norm_eps) * gain
    centred = x - x.mean(-1, keepdim=True)
    y = centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + model.norm_eps) * gain
    return y + weights[f"{name}.bias"] if f"{name}.bias" in weights else y


def _linear(weights, name, x, outputs):
    weight = weights[f"{name}.weight"]
    y = x @ weight.reshape(outputs, -1).T
    return y + weights[f"{name}.bias"].reshape(-1) if f"{name}.bias" in weights else y


def _attention(weights, model, mixer, name, y, mask, positions, handed=None):
    batch, length, _ = y.shape
    sight = getattr(mixer, "window", None), getattr(mixer, "attention_chunk", None)
    groups, width = _choose(mixer.kv_heads, model.kv_heads), _choose(mixer.head_dim, model.head_dim)
    per_group = _choose(mixer.heads, model.heads) // groups
    qk_norm = _choose(mixer.qk_norm, model.qk_norm)
    rotated = 0
    if _choose(mixer.rotary, model.position == "rotary"):
        rotated = round(width * _choose(mixer.rotary_fraction, model.rotary_fraction))
    base = _choose(mixer.rotary_base, model.rotary_base)
    value_dim = 0 if mixer.keys_as_values else _choose(mixer.v_head_dim, width)
    rows = (per_group + 1) * width
    if mixer.shared_keys:  # with keys and values in whose place others come below
        query = _linear(weights, f"{name}.attention.query", y, groups * per_group * width)
        query = query.view(batch, length, groups, per_group * width)
        qkv = torch.cat((query, torch.ones(batch, length, groups, width + value_dim)), -1)
    else:
        qkv = _linear(weights, f"{name}.attention.qkv", y, groups * (rows + value_dim))
        qkv = qkv.view(batch, length, groups, rows + value_dim)
    values, qkv = qkv[..., rows:], qkv[..., :rows].unflatten(3, (per_group + 1, width))
    if mixer.keys_as_values:
        values = qkv[..., -1, :]
    if mixer.value_norm:
        values = values / torch.sqrt(values.square().mean(-1, keepdim=True) + model.norm_eps)
    if qk_norm == "whole":
        parts = (("query", qkv[:, :, :, :-1]), ("key", qkv[:, :, :, -1:]))
        normed = []
        for part, heads in parts:
            gain = weights[f"{name}.attention.{part}_norm.gain"].flatten()
            row = heads.flatten(2)
            size = torch.sqrt(row.square().mean(-1, keepdim=True) + model.norm_eps)
            normed.append((row / size * gain).view(heads.shape))
        qkv = torch.cat(normed, 3)
    heads = []

    def prepare(part, x, number):
        """Normalise and rotate a query or key head, in their order."""
        path = f"{name}.attention.{part}_norm"
        last = mixer.norm_after_rotation
        x = _rotate(model, x, positions, rotated, base, mixer.rotary_scaling) if last else x
        if mixer.shared_keys and part == "key":
            return x
        if qk_norm == "layernorm_per_head":
            own = {f"{path}.gain": weights[f"{path}.gain"][number]}
            x = _norm(own, model, path, x, "layernorm")
        elif qk_norm == "l2":
            x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + model.norm_eps)
        elif qk_norm in (True, "layernorm"):
            x = _norm(weights, model, path, x, "rmsnorm" if qk_norm is True else qk_norm)
        return x if last else _rotate(model, x, positions, rotated, base, mixer.rotary_scaling)

    own = [prepare("key", qkv[:, :, group, -1], group) for group in range(groups)]
    keys = torch.stack(own, 2)
    if mixer.shared_keys:
        keys, values = handed[sight]
    elif handed is not None:
        handed[sight] = keys, values
    for group in range(groups):
        key, value = keys[:, :, group], values[:, :, group]
        for member in range(per_group):
            query = prepare("query", qkv[:, :, group, member], len(heads))
            query = query * _query_factor(mixer, positions)
            scale = width**-0.5 * _fall_of_scores(model, model.head_dim)
            scores = query @ key.transpose(1, 2) * _choose(mixer.score_scale, scale)
            if mixer.alibi is not None:
                slope = _list_slopes(per_group * groups, mixer.alibi)[len(heads)]
                if mixer.alibi_form == "falcon":
                    added = torch.tensor(slope).bfloat16() * positions[:, None].bfloat16()
                    scores = scores + _choose(mixer.score_scale, scale) * added.double()
                else:
                    distances = positions[:, :, None] - positions[:, None]
                    scores = scores - slope * distances.double()
            if mixer.softcap is not None:
                scores = mixer.softcap * torch.tanh(scores / mixer.softcap)
            scores = scores.masked_fill(~mask, -torch.inf)
            if mixer.sinks:  # one more column of scores, whose share is dropped
                sink = weights[f"{name}.attention.sinks.logits"][len(heads)]
                scores = torch.cat((scores, sink.expand(batch, length, 1)), -1)
            heads.append(scores.softmax(-1)[..., :length] @ value)
    if mixer.output_gate != "none":  # rows of the weight are in the order of the heads
        for number, rows in enumerate(weights[f"{name}.attention.gate.weight"]):
            heads[number] = heads[number] / (1 + torch.exp(-y @ rows.T))
    return _linear(weights, f"{name}.attention.output", torch.cat(heads, -1), model.hidden)


def _fall_of_scores(model, width):
    """Return what makes of 1 / sqrt(width), beyond the width of the base model, 1 / width."""
    return math.sqrt(_choose(model.mup_base_head_dim, width) / width)


def _list_slopes(heads, largest):
    """Return ALiBi's slopes as its paper's code has them."""
    if math.log2(heads).is_integer():
        return [2.0 ** (-largest * (n + 1) / heads) for n in range(heads)]
    below = 2 ** math.floor(math.log2(heads))
    return [*_list_slopes(below, largest), *_list_slopes(2 * below, largest)[::2][: heads - below]]


def _query_factor(mixer, positions):
    scale = mixer.query_scale
    if scale is None:
        return 1.0
    whole = ((positions + scale.first) // scale.length).double()
    return (1 + scale.rate * torch.log(1 + whole))[..., None]


def _latent_attention(weights, model, mixer, name, y, mask, positions, counted, aside, handed):
    """Compute each head separately, by the formulas of the paper (DeepSeek-V2, 2024, eq. 9-19).
    `aside` gets the loss of the indexer, if there is one."""
    latent = model.latent
    down = weights[f"{name}.attention.down.weight"]
    rank = latent.query_rank or 0
    of_query = y
    if rank:
        of_query = y @ down[:rank].T
        of_query = _norm(weights, model, f"{name}.attention.query_norm", of_query, "rmsnorm")
    of_kv = y @ down[rank : rank + latent.kv_rank].T
    of_kv = _norm(weights, model, f"{name}.attention.kv_norm", of_kv, "rmsnorm")
    width, base = latent.rotary_dim, model.rotary_base
    turned = width * (model.position == "rotary")
    key_rotated = _rotate(model, y @ down[rank + latent.kv_rank :].T, positions, turned, base)
    whole_width = latent.rotary_dim + latent.head_dim
    scale = _fall_of_scores(model, whole_width) / math.sqrt(whole_width)
    if model.rotary_scaling.kind == "yarn":
        scaling = model.rotary_scaling
        scale *= (0.1 * scaling.mscale_all_dim * math.log(scaling.factor) + 1) ** 2
    heads, shares, index, indexer = [], 0.0, None, model.indexer
    place = "chosen", mixer.window
    if mixer.shared_indexer:
        mask = mask & handed[place]
    elif indexer is not None:
        index = _score_keys(weights, model, f"{name}.attention.indexer", y, of_query, positions)
        chosen = torch.ones_like(index, dtype=torch.bool)
        if not indexer.dense:
            chosen = _choose_keys(index, mask, indexer.top_k)
        mask = mask & chosen
        if handed is not None:
            handed[place] = chosen
    for head in range(model.heads):
        query_part = weights[f"{name}.attention.query.weight"][head]
        kv_part = weights[f"{name}.attention.kv.weight"][head]
        query = of_query @ query_part.T
        query_rotated = _rotate(model, query[..., :width], positions, turned, base)
        query_rest = query[..., width:]
        key_rest = of_kv @ kv_part[: latent.head_dim].T
        scores = query_rotated @ key_rotated.mT + query_rest @ key_rest.mT
        scores = scores * _query_factor(mixer, positions)
        value = of_kv @ kv_part[latent.head_dim :].T
        share = (scores * scale).masked_fill(~mask, -torch.inf).softmax(-1)
        shares = shares + share.detach() / model.heads
        heads.append(share @ value)
    if index is not None and indexer.loss:
        aside.append(indexer.loss * (_diverge(shares, index, mask) * counted).sum())
    return _linear(weights, f"{name}.attention.output", torch.cat(heads, -1), model.hidden)


def _score_keys(weights, model, name, y, of_query, positions):
    """Return the scores of an indexer, head by head (DeepSeek-V3.2, 2025, eq. 1), of which no
    gradient reaches its inputs."""
    indexer, turned = model.indexer, model.latent.rotary_dim * (model.position == "rotary")
    y, of_query, total = y.detach(), of_query.detach(), 0.0
    rows = weights[f"{name}.key.weight"]
    key = y @ rows[: indexer.head_dim].T
    key = key - key.mean(-1, keepdim=True)
    key = key / torch.sqrt(key.square().mean(-1, keepdim=True) + 1e-6)
    key = key * weights[f"{name}.key_norm.gain"] + weights[f"{name}.key_norm.bias"]
    key = _rotate(model, key, positions, turned, model.rotary_base)
    for head in range(indexer.heads):
        query = of_query @ weights[f"{name}.query.weight"][head].T
        query = _rotate(model, query, positions, turned, model.rotary_base)
        factor = y @ rows[indexer.head_dim + head] / math.sqrt(indexer.heads * indexer.head_dim)
        total = total + factor[..., None] * (query @ key.mT).clamp_min(0)
    return total


def _choose_keys(index, mask, number):
    """Return which keys have the largest scores, one query after the other."""
    chosen = torch.zeros_like(index, dtype=torch.bool)
    for b in range(len(index)):
        for query in range(index.shape[1]):
            seen = [k for k in range(index.shape[2]) if (mask.expand(index.shape))[b, query, k]]
            best = sorted(seen, key=lambda k: (-index[b, query, k].item(), k))[:number]
            chosen[b, query, best] = True
    return chosen


def _diverge(shares, index, mask):
    """Return KL(shares || softmax of the scores over the keys that are seen), of each query."""
    logs = torch.log_softmax(index.masked_fill(~mask, -torch.inf), -1).masked_fill(~mask, 0.0)
    return (torch.special.xlogy(shares, shares) - shares * logs).sum(-1)


def _mix_by_example(kind, weights, model, mixer, name, y, mask, positions):
    def rotate(x):
        width = model.head_dim * (model.position == "rotary")
        return _rotate(model, x, positions, width, model.rotary_base)

    return MIXERS[kind](weights, model, mixer, name, y, mask, positions, rotate)


def _rotate(model, x, positions, width, base, scaling=None):
    if not width:
        return x
    scaling = scaling or model.rotary_scaling
    rate, factor = compute_frequencies(RotaryDescription(width, base, scaling), x.shape[1])
    pairs = len(rate)
    turned = torch.polar(
        torch.full_like(positions, factor, dtype=torch.float64)[..., None],
        positions[..., None] * rate,
    )
    complex_x = torch.complex(x[..., :pairs].double(), x[..., pairs : 2 * pairs].double()) * turned
    return torch.cat((complex_x.real, complex_x.imag, x[..., 2 * pairs :]), -1).to(x.dtype)


def _experts(weights, model, name, y, counted, tokens):
    """Compute every token and every one of its experts separately; return output and losses."""
    moe, x, kind = model.moe, y, get_part_name(model.activation)

    def normalised(part, rows):
        own = f"{name}.moe.{part}_norm"
        return _norm(weights, model, own, rows, model.norm) if moe.own_norms else rows

    logits = normalised("router", y) @ weights[f"{name}.moe.router.weight"].T
    y = normalised("experts", y)
    logits = logits + weights.get(f"{name}.moe.router.bias", 0.0)
    makers = {"sigmoid": torch.sigmoid, "softmax": partial(torch.softmax, dim=-1)}
    scores = makers.get(moe.score, lambda x: torch.log(1 + torch.exp(x)) ** 0.5)(logits)
    balance, table = (weights.get(f"{name}.moe.router.{k}") for k in ("balance", "table"))
    biased = moe.balance == "bias" and table is None
    ranked = scores.detach() + (balance.detach() if biased else 0.0)
    size = moe.experts // moe.groups
    out, load = torch.zeros_like(x), torch.zeros(*x.shape[:1], moe.experts, dtype=x.dtype)
    up, down = weights[f"{name}.moe.experts.up.weight"], weights[f"{name}.moe.experts.down.weight"]
    biases = [weights.get(f"{name}.moe.experts.{m}.bias") for m in ("up", "down")]
    for b in range(x.shape[0]):
        for s in range(x.shape[1]):
            groups = [ranked[b, s, g * size : (g + 1) * size] for g in range(moe.groups)]
            best = [
                float(group.sort(descending=True)[0][: moe.group_best].sum()) for group in groups
            ]
            open_groups = sorted(range(moe.groups), key=lambda g: -best[g])[: moe.top_groups]
            allowed = [g * size + i for g in open_groups for i in range(size)]
            chosen = sorted(allowed, key=lambda e: -float(ranked[b, s, e]))[: moe.top_k]
            if table is not None:
                chosen = [int(128 * high + low) for high, low in table[tokens[b, s]]]
            total = sum(scores[b, s, e] for e in chosen) if moe.normalise else 1.0
            total = total + moe.normalise_eps * moe.normalise
            for e in chosen:
                load[b, e] += float(counted[b, s])
                gate = moe.scale * scores[b, s, e] / total
                gate = gate * weights[f"{name}.moe.router.gain"][e] if moe.expert_gain else gate
                before, after = (gate, 1.0) if moe.scale_inputs else (1.0, gate)
                outer = before * y[b, s] @ up[e].reshape(-1, model.hidden).T
                outer = outer if biases[0] is None else outer + biases[0][e].flatten()
                result = down[e] @ _activated(kind, outer, moe.ffn, model.activation_limit)
                result = result if biases[1] is None else result + biases[1][e]
                out[b, s] = out[b, s] + after * result
    out = normalised("experts_post", out)
    if moe.shared:
        y, width = normalised("shared", x), moe.shared * moe.ffn
        outputs = width * (2 if kind in _GATES else 1)
        inner = _linear(weights, f"{name}.moe.shared.up", y, outputs)
        inner = _activated(kind, inner, width, model.activation_limit)
        of_all = _linear(weights, f"{name}.moe.shared.down", inner, model.hidden)
        if moe.shared_gate:
            of_all = of_all / (1 + torch.exp(-y @ weights[f"{name}.moe.shared_gate.weight"].T))
        out = out + normalised("shared_post", of_all)
    share = scores / scores.sum(-1, keepdim=True) * counted[..., None]
    if moe.balance == "global":
        relative = balance.expand(load.shape)
    else:
        relative = load / load.mean(1, keepdim=True).clamp_min(1e-300)
    balances = moe.balance != "none" and table is None
    losses = moe.balance_loss * (relative[:, None] * share).sum() * balances
    return out, losses + moe.z_loss * (logits.logsumexp(-1).square() * counted).sum()


def _gelu_tanh(y):
    return 0.5 * y * (1 + torch.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))


def _gate_as_gpt_oss(gate, up):
    gate, up = torch.where(gate > 7, 7, gate), torch.where(up.abs() > 7, 7 * up.sign(), up)
    return (up + 1) * gate / (1 + torch.exp(-1.702 * gate))


_GATES = {
    "swiglu": lambda gate, up: gate * torch.sigmoid(gate) * up,
    "geglu": lambda gate, up: _gelu_tanh(gate) * up,
    "swiglu_clamped": _gate_as_gpt_oss,
    "reglu": lambda gate, up: gate.clamp_min(0) * up,
}


def _activated(kind, y, width, limit=None):
    if limit is not None and kind == "swiglu":
        gate, up = y[..., :width], y[..., width:]
        up = torch.where(up.abs() > limit, limit * up.sign(), up)
        y = torch.cat((torch.where(gate > limit, limit, gate), up), -1)
    if kind in _GATES:
        return _GATES[kind](y[..., :width], y[..., width:])
    if kind in ("relu", "relu2"):
        return y.clamp_min(0) ** (2 if kind == "relu2" else 1)
    if kind == "gelu":
        return y * 0.5 * (1 + torch.erf(y / math.sqrt(2)))
    return _gelu_tanh(y)


def _mlp(weights, model, feed_forward, name, y):
    if feed_forward.kind == "low_rank":
        path, kind, width = f"{name}.low_rank", model.activation, model.ffn
        y = _linear(weights, f"{path}.narrow", y, feed_forward.rank)
    else:
        path, kind = f"{name}.mlp", _choose(feed_forward.activation, model.activation)
        width = _choose(feed_forward.ffn, model.ffn)
    kind = get_part_name(kind)
    outputs = width * (2 if kind in _GATES else 1)
    y = _linear(weights, f"{path}.up", y, outputs)
    if getattr(feed_forward, "sparsity", 0.0):
        gates, share = y[..., :width], torch.tensor(feed_forward.sparsity, dtype=torch.float32)
        mean, deviation = gates.mean(-1, keepdim=True), gates.std(-1, keepdim=True, correction=0)
        bound = mean + math.sqrt(2) * float(torch.special.erfinv(2 * share - 1)) * deviation
        y = torch.cat((torch.relu(gates - bound), y[..., width:]), -1)
    if kind == "xielu":
        sides = (weights[f"{path}.activation.{side}"] for side in ("positive", "negative"))
        positive, negative = (torch.log(1 + torch.exp(side)) for side in sides)
        below = (negative + 0.5) * (torch.exp(y.clamp(max=-1e-6)) - 1 - y)
        y = torch.where(y > 0, positive * y * y, below) + 0.5 * y
    else:
        y = _activated(kind, y, width, model.activation_limit)
    return _linear(weights, f"{path}.down", y, model.hidden)


def _mask(window, chunk, microbatch, batch, length):
    mask = torch.zeros(batch, length, length, dtype=torch.bool)
    for b in range(batch):
        for query in range(length):
            for key in range(query + 1):
                in_window = window is None or query - key < window
                documents = microbatch.documents_BS
                numbers = torch.zeros(length) if documents is None else documents[b]
                same = numbers[query] == numbers[key]
                first = numbers.tolist().index(numbers[query])
                if chunk is not None:
                    in_window = (query - first) // chunk == (key - first) // chunk
                mask[b, query, key] = in_window and same
    return mask
