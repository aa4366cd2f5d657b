"""The mixers of examples/ token by token in plain autograd, for `reference_model.loss`."""

import math

import torch
import torch.nn.functional as F


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


MIXERS = {
    "gated_linear": mix_by_gated_linear_attention,
    "differential": mix_by_differential_attention,
}
FILES = {"gated_linear": "gated_linear_attention.py", "differential": "differential_attention.py"}
"""The example that has each of them."""
