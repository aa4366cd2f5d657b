"""Linear attention and the mixers of examples/ token by token in plain autograd, for
`reference_model.loss`."""

import math
from itertools import product

import torch
import torch.nn.functional as F

from megaframe.architecture.rotary import RotaryDescription
from megaframe.model.rotary import compute_frequencies


def mix_by_gated_linear_attention(weights, model, mixer, name, y, mask, positions, rotate):
    """Return the output of a layer: S = a S + k^T v and o = q S for one token after the other."""
    name, width = f"{name}.linear_attention", model.head_dim
    out = torch.zeros_like(y)
    for head in range(model.heads):
        query, key, value, gate, decay = (
            y @ rows.T for rows in weights[f"{name}.input.weight"][head].split((*[width] * 4, 1))
        )
        for sample in range(len(y)):
            state, results = torch.zeros(width, width, dtype=y.dtype), []
            for token in range(y.shape[1]):
                if token and not mask[sample, token, token - 1]:
                    state = torch.zeros_like(state)  # a document begins
                factor = torch.sigmoid(decay[sample, token]) ** (1 / 16)
                state = factor * state + torch.outer(key[sample, token], value[sample, token])
                result = query[sample, token] @ state / math.sqrt(width)
                result = result / torch.sqrt(result.square().mean() + 1e-6)
                result = result * weights[f"{name}.norm.gain"]
                results.append(F.silu(gate[sample, token]) * result)
            products = torch.stack(results) @ weights[f"{name}.output.weight"][:, head].T
            out = out + F.pad(products[None], (0, 0, 0, 0, sample, len(y) - sample - 1))
    return out


def mix_by_differential_attention(weights, model, mixer, name, y, mask, positions, rotate):
    """Return the output of a layer, pair by pair, by the formulas of the paper (section 2.1)."""
    name, width = f"{name}.attention", model.head_dim
    vectors = weights[f"{name}.factors.vectors"]
    factor = (
        torch.exp((vectors[0] * vectors[1]).sum())
        - torch.exp((vectors[2] * vectors[3]).sum())
        + 0.8
    )
    outputs = []
    for rows in weights[f"{name}.qkv.weight"]:
        maps = []
        for head in range(2):
            query, key = rotate(y @ rows[head].T), rotate(y @ rows[2 + head].T)
            scores = query @ key.mT / math.sqrt(width)
            maps.append(scores.masked_fill(~mask, -torch.inf).softmax(-1))
        value = y @ rows[4:].flatten(0, 1).T
        out = (maps[0] - factor * maps[1]) @ value
        out = out / torch.sqrt(out.square().mean(-1, keepdim=True) + model.norm_eps)
        outputs.append((1 - 0.8) * out * weights[f"{name}.norm.gain"])
    y = torch.cat(outputs, -1) @ weights[f"{name}.output.weight"].flatten(1).T
    return y + weights[f"{name}.output.bias"] if model.bias else y


def mix_by_gated_delta_net(weights, model, mixer, name, y, mask, positions, rotate):
    """Return the output of a layer: S = a S + b k^T (v - a k S), one token after the other."""
    name, groups = f"{name}.delta_net", mixer.key_heads or model.heads
    key_dim, heads = mixer.key_dim or model.head_dim, (mixer.value_heads or groups) // groups
    value_dim, taps = mixer.value_dim or key_dim, mixer.convolution
    channels, strongest = 2 * key_dim + heads * value_dim, 1 + mixer.negative_eigenvalues
    norm_eps = mixer.norm_eps or model.norm_eps
    out = torch.zeros_like(y)
    for sample, group in product(range(len(y)), range(groups)):
        made = y[sample] @ weights[f"{name}.input.weight"][group].T
        convolution = weights[f"{name}.convolution.gain"][group]
        states, results = [torch.zeros(key_dim, value_dim, dtype=y.dtype)] * heads, []
        for token in range(y.shape[1]):
            near = range(max(0, token - taps + 1), token + 1)
            seen = sum(
                convolution[:, taps - 1 - token + other] * made[other, :channels]
                for other in near
                if mask[sample, token, other]
            )
            query, key, *values = F.silu(seen).split((key_dim, key_dim, *[value_dim] * heads))
            query, key = (x / torch.sqrt(x.square().sum() + 1e-6) for x in (query, key))
            decay_rank, gate_rank = mixer.decay_rank or 0, mixer.gate_rank or 0
            sizes = heads * value_dim * (not gate_rank), heads, heads * (not decay_rank)
            gates, strengths, decays = made[token, channels:].split(sizes)
            if decay_rank:
                latent = weights[f"{name}.down.weight"][:decay_rank] @ y[sample, token]
                decays = weights[f"{name}.decay_up.weight"][group] @ latent
            if gate_rank:
                latent = weights[f"{name}.down.weight"][decay_rank:] @ y[sample, token]
                gates = weights[f"{name}.gate_up.weight"][group] @ latent
            gates, decays = gates.view(heads, value_dim), decays.view(heads, -1)
            for head in range(heads):
                state = states[head]
                if token and not mask[sample, token, token - 1]:
                    state = torch.zeros_like(state)  # a document begins
                rate, step = (
                    weights[f"{name}.decay.{part}"][group, head] for part in ("rate", "step")
                )
                fall = -torch.exp(rate) * F.softplus(decays[head] + step)
                state = torch.exp(fall)[:, None] * state
                strength = strongest * torch.sigmoid(strengths[head])
                state = state + torch.outer(key, strength * (values[head] - key @ state))
                result = query @ state / math.sqrt(key_dim)
                result = result / torch.sqrt(result.square().mean() + norm_eps)
                gate = {"silu": F.silu, "sigmoid": torch.sigmoid}[mixer.gate](gates[head])
                results.append(result * weights[f"{name}.norm.gain"] * gate)
                states[head] = state
        rows = torch.cat(results).view(y.shape[1], -1)
        products = rows @ weights[f"{name}.output.weight"][:, group].T
        out = out + F.pad(products[None], (0, 0, 0, 0, sample, len(y) - sample - 1))
    return out


def mix_by_gated_short_convolution(weights, model, mixer, name, y, mask, positions, rotate):
    """Return the output of a layer: y = out(c * sum of taps of b * x), token by token."""
    name, taps = f"{name}.gated_short_convolution", mixer.convolution
    bias = model.bias if mixer.bias is None else mixer.bias
    before, after, x = (
        y @ weights[f"{name}.input.weight"][part].T
        + (weights[f"{name}.input.bias"][part] if bias else 0.0)
        for part in range(3)
    )
    gain, rows = weights[f"{name}.convolution.gain"], []
    for sample, token in product(range(len(y)), range(y.shape[1])):
        near = [n for n in range(max(0, token - taps + 1), token + 1) if mask[sample, token, n]]
        mixed = sum(gain[:, taps - 1 - token + n] * (before * x)[sample, n] for n in near)
        mixed = mixed + weights[f"{name}.convolution.bias"] if bias else mixed
        rows.append(after[sample, token] * mixed)
    out = torch.stack(rows).view(y.shape) @ weights[f"{name}.output.weight"].T
    return out + weights[f"{name}.output.bias"] if bias else out


def mix_by_mamba2(weights, model, mixer, name, y, mask, positions, rotate):
    """Return the output of a layer: S = a S + d k^T x and y = q S + g x, one token after the
    other."""
    name, groups, taps = f"{name}.mamba2", mixer.groups, mixer.convolution
    heads, width = (mixer.heads or model.heads) // groups, mixer.head_dim or model.head_dim
    bias = model.bias if mixer.bias is None else mixer.bias
    inner, most = heads * width, math.inf if mixer.step_max is None else mixer.step_max
    out = torch.zeros_like(y)
    for sample, group in product(range(len(y)), range(groups)):
        made = y[sample] @ weights[f"{name}.input.weight"][group].T
        if f"{name}.input.bias" in weights:
            made = made + weights[f"{name}.input.bias"][group]
        channels = made[:, inner : 2 * inner + 2 * mixer.state_dim]
        gain = weights[f"{name}.convolution.gain"][group]
        states, rows = [torch.zeros(mixer.state_dim, width, dtype=y.dtype)] * heads, []
        for token in range(y.shape[1]):
            near = range(max(0, token - taps + 1), token + 1)
            near = [other for other in near if mask[sample, token, other]]
            seen = sum(gain[:, taps - 1 - token + other] * channels[other] for other in near)
            if mixer.convolution_bias:
                seen = seen + weights[f"{name}.convolution.bias"][group]
            *xs, key, query = F.silu(seen).split((*[width] * heads, *[mixer.state_dim] * 2))
            results = []
            for head in range(heads):
                rate, step = (
                    weights[f"{name}.decay.{part}"][group, head] for part in ("rate", "step")
                )
                step = F.softplus(made[token, head - heads] + step)
                step = torch.where(step < mixer.step_min, mixer.step_min, step)
                step = torch.where(step > most, most, step)
                state = states[head]
                if token and not mask[sample, token, token - 1]:
                    state = torch.zeros_like(state)  # a document begins
                state = torch.exp(-torch.exp(rate) * step) * state
                states[head] = state + torch.outer(key, step * xs[head])
                skip = weights[f"{name}.skip.gain"][group, head]
                results.append(query @ states[head] + skip * xs[head])
            result, gate = torch.cat(results), F.silu(made[token, :inner])
            if mixer.norm != "before_gate":
                result = result * gate
            if mixer.norm != "none":
                result = result / torch.sqrt(result.square().mean() + model.norm_eps)
                result = result * weights[f"{name}.norm.gain"][group]
            rows.append(result * gate if mixer.norm == "before_gate" else result)
        whole = weights[f"{name}.output.weight"].reshape(y.shape[-1], groups, inner)
        products = torch.stack(rows) @ whole[:, group].T
        out = out + F.pad(products[None], (0, 0, 0, 0, sample, len(y) - sample - 1))
    return out + weights[f"{name}.output.bias"] if bias else out


def mix_by_compressed_attention(weights, model, mixer, name, y, mask, positions, rotate):
    """Return the output of a layer, one query after the other (DeepSeek-V4)."""
    name, rank = f"{name}.compressed_attention", mixer.query_rank
    heads, width = mixer.heads or model.heads, mixer.head_dim or model.head_dim
    turned = round((mixer.rotary_fraction or model.rotary_fraction) * width)
    turned *= model.position == "rotary"
    scaling = mixer.rotary_scaling or model.rotary_scaling
    base, compression = mixer.rotary_base or model.rotary_base, mixer.compression
    rotary = RotaryDescription(turned, base, scaling)

    def normed(x, part=None):
        x = x / torch.sqrt(x.square().mean(-1, keepdim=True) + model.norm_eps)
        return x if part is None else x * weights[f"{name}.{part}.gain"]

    def turn(x, place, way=1):
        if not turned:
            return x
        rate, factor = compute_frequencies(rotary, y.shape[1])
        cos, sin = factor * torch.cos(place * rate), way * factor * torch.sin(place * rate)
        a, b, rest = x.split((turned // 2, turned // 2, len(x) - turned))
        return torch.cat((a * cos - b * sin, b * cos + a * sin, rest))

    def compress(rows, part, size, firsts, places):
        """Return the keys of windows with their last tokens."""
        products, bias = (
            weights[f"{name}.{part}.product.weight"],
            weights[f"{name}.{part}.places.bias"],
        )
        values, logits = rows @ products[0].T, rows @ products[1].T
        keys, count = [], compression.tokens
        for last in range(len(rows)):
            number = last - firsts[last]
            if (number + 1) % count:
                continue
            own = range(last - count + 1, last + 1)
            taken = [
                (values[t, -size:], logits[t, -size:] + bias[n, -size:]) for n, t in enumerate(own)
            ]
            if compression.overlap and number >= 2 * count - 1:
                taken += [
                    (values[t - count, :size], logits[t - count, :size] + bias[n, :size])
                    for n, t in enumerate(own)
                ]
            shares = torch.stack([logit for _, logit in taken]).softmax(0)
            key = (shares * torch.stack([value for value, _ in taken])).sum(0)
            keys.append((last, turn(normed(key, f"{part}.norm"), places[last] - count + 1)))
        return keys

    def choose(rows, latent, query, place, keys, seen):
        """Return the numbers of the compressed keys that a query sees of some."""
        indexer = compression.indexer
        factors = rows[query] @ weights[f"{name}.indexer.weights.weight"].T
        scores = torch.zeros(len(keys), dtype=y.dtype)
        for head in range(indexer.heads):
            of_head = weights[f"{name}.indexer.query.weight"][head] @ latent[query]
            of_head = turn(of_head, place)
            for n, (_, key) in enumerate(keys):
                scores[n] += (factors[head] * (of_head @ key).clamp_min(0)).detach()
        return sorted(seen, key=lambda n: (-float(scores[n]), n))[: indexer.top_k]

    down = y @ weights[f"{name}.down.weight"].T
    latents, keys = normed(down[..., :rank], "query_norm"), normed(down[..., rank:], "key_norm")
    outputs = []
    for sample, rows in enumerate(y):
        places, firsts, compressed, of_index = positions[sample], [], [], []
        for token in range(len(rows)):
            begins = not token or not mask[sample, token, token - 1]
            firsts.append(token if begins else firsts[-1])
        own = [turn(key, place) for key, place in zip(keys[sample], places, strict=True)]
        if compression is not None:
            compressed = compress(rows, "compressor", width, firsts, places)
            if compression.indexer is not None:
                size = compression.indexer.head_dim
                of_index = compress(rows, "indexer", size, firsts, places)
        for query, place in enumerate(places):
            near = [own[token] for token in range(len(rows)) if mask[sample, query, token]]
            seen = [
                n
                for n, (last, _) in enumerate(compressed)
                if last <= query and firsts[last] == firsts[query]
            ]
            if of_index:
                seen = choose(rows, latents[sample], query, place, of_index, seen)
            values, made = torch.stack(near + [compressed[n][1] for n in seen]), []
            for head in range(heads):
                vector = turn(
                    normed(weights[f"{name}.query.weight"][head] @ latents[sample, query]), place
                )
                sink = weights[f"{name}.sinks.logits"][head][None]
                shares = torch.cat((values @ vector / math.sqrt(width), sink)).softmax(0)
                made.append(turn(shares[:-1] @ values, place, -1))
            groups = weights[f"{name}.groups.weight"]
            parts = torch.cat(made).view(len(groups), -1)
            made = torch.cat([matrix @ part for matrix, part in zip(groups, parts, strict=True)])
            outputs.append(weights[f"{name}.output.weight"].flatten(1) @ made)
    out = torch.stack(outputs).view(y.shape)
    return out + weights[f"{name}.output.bias"] if model.bias else out


MIXERS = {
    "compressed_attention": mix_by_compressed_attention,
    "mamba2": mix_by_mamba2,
    "gated_short_convolution": mix_by_gated_short_convolution,
    "gated_delta_net": mix_by_gated_delta_net,
    "gated_linear": mix_by_gated_linear_attention,
    "differential": mix_by_differential_attention,
}
FILES = {"gated_linear": "gated_linear_attention.py", "differential": "differential_attention.py"}
"""The example that has each of them."""
