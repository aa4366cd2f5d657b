"""The mixers of examples/ token by token in plain autograd, for `reference_model.loss`."""

import math

import torch
import torch.nn.functional as F


def mix_by_gated_linear_attention(weights, model, mixer, name, y, mask, positions):
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


MIXERS = {"gated_linear": mix_by_gated_linear_attention}
