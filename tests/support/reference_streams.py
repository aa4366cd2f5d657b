"""Hyper-connections and AltUp in plain torch, one stream at a time, as the reference of
`megaframe.model.streams`."""

import torch


def connect(weights, model, name, x):
    """Return what a half reads of the streams [..., n, H], and what writes its output to them."""
    n, eps = model.streams.number, model.streams.eps
    made = _project(model, x, weights[f"{name}.weights.weight"])
    scale, bias = weights[f"{name}.scale.gain"], weights[f"{name}.weights.bias"]
    a = torch.sigmoid(scale[0] * made[..., :n] + bias[:n]) + eps
    c = 2 / (1 + torch.exp(-scale[1] * made[..., n : 2 * n] - bias[n : 2 * n]))
    mix = (scale[2] * made[..., 2 * n :] + bias[2 * n :]).unflatten(-1, (n, n))
    mix = torch.exp(mix) / torch.exp(mix).sum(-1, keepdim=True) + eps
    for iteration in range(model.streams.iterations):
        if iteration:
            mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)

    def write(y):
        rows = []
        for i in range(n):
            kept = sum(mix[..., j, i, None] * x[..., j, :] for j in range(n))
            rows.append(kept + c[..., i, None] * y)
        return torch.stack(rows, -2)

    return _sum(a, x), write


def _sum_streams(weights, model, x):
    """Return what the head reads of the streams."""
    made = _project(model, x, weights["head.streams.gain"])
    scale, bias = weights["head.streams.scale.gain"], weights["head.streams.bias"]
    return _sum(torch.sigmoid(scale * made + bias) + model.streams.eps, x)


def _project(model, x, matrix):
    rows = x.flatten(-2)
    return rows / torch.sqrt((rows**2).mean(-1, keepdim=True) + model.norm_eps) @ matrix.T


def _sum(factors, x):
    return sum(factors[..., i, None] * x[..., i, :] for i in range(x.shape[-2]))


def first_streams(weights, model, x):
    """Return all streams of the embeddings [..., H]."""
    if model.streams.kind == "hyper_connections":
        return torch.stack([x] * model.streams.number, -2)
    others = [_resize(x @ matrix.T, x) for matrix in weights["embedding.streams.gain"]]
    return torch.stack([x, *others], -2)


def last_streams(weights, model, x):
    """Return what the head reads of the streams."""
    if model.streams.kind == "hyper_connections":
        return _sum_streams(weights, model, x)
    first, rows = x[..., 0, :], weights["head.streams.gain"]
    others = [_resize(x[..., i + 1, :] @ rows[i].T, first) for i in range(len(rows))]
    return (first + sum(others)) / (1 + len(others))


def alternate(weights, model, name, x, compute):
    """Return the streams [..., n, H] after a block, which makes y of one stream."""
    n, gain = model.streams.number, weights[f"{name}.norm.gain"]

    def route(row):
        normed = row / torch.sqrt((row**2).mean(-1, keepdim=True) + model.norm_eps) * gain
        return torch.tanh(normed / model.hidden @ weights[f"{name}.router.gain"].T)

    made = route(x[..., 0, :]) @ weights[f"{name}.predict.gain"].reshape(n * n, n).T
    predicted = [
        x[..., i, :] + sum(made[..., n * i + j, None] * x[..., j, :] for j in range(n))
        for i in range(n)
    ]
    y, *rest = compute(predicted[0])
    factors = route(y) @ weights[f"{name}.correct.gain"].T
    change = y - predicted[0]
    rows = [predicted[i] + (1 + factors[..., i, None]) * change for i in range(n)]
    return torch.stack(rows, -2), *rest


def _resize(x, other):
    size, own = (row.square().mean(-1, keepdim=True) for row in (other, x))
    return x * torch.sqrt(size) / torch.sqrt(own.clamp(min=1e-5))
