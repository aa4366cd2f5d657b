"""Rooflines: what bounds a kernel or a transfer, and the size at which compute does.

Source: Williams, Waterman and Patterson 2009, "Roofline: an insightful visual performance model".
An operation of F FLOPs that moves Q bytes has the intensity F / Q. It is bound by compute if that
is at least the ridge, the FLOPs of the chip in the time of one byte; otherwise by the bytes.
Memory has a ridge, and so has every link.
"""

from __future__ import annotations


def compute_ridge(flops: float, bandwidth: float) -> float:
    """Return the ridge in FLOPs per byte: FLOP/s divided by bytes/s."""
    return flops / bandwidth


def compute_attainable_flops(intensity: float, flops: float, bandwidth: float) -> float:
    """Return the FLOP/s that an operation can reach: the lower of both roofs.

    Args:
        intensity: FLOPs of the operation per byte that it moves.
        flops: FLOP/s of the chip.
        bandwidth: bytes/s of its memory, or of a link.
    """
    return min(flops, intensity * bandwidth)


def compute_product_intensity(rows: float, outputs: float, terms: float, width: float) -> float:
    """Return the intensity of a product [rows, terms] x [terms, outputs] that reads both operands
    and writes the result once: 2 m n k / (w (m k + k n + m n)).

    Args:
        rows, outputs, terms: m, n and k.
        width: Bytes of a value (w).
    """
    moved = width * (rows * terms + terms * outputs + rows * outputs)
    return 2.0 * rows * outputs * terms / moved


def find_product_rows(ridge: float, outputs: float, terms: float, width: float) -> float | None:
    """Return the rows at which a product reaches the ridge R: m = R w k n / (2 k n - R w (k + n)).
    None if it never does, because with unlimited rows its intensity is 2 k n / (w (k + n)).

    Args:
        ridge: FLOPs per byte.
        outputs, terms: n and k.
        width: Bytes of a value.
    """
    left = 2.0 * terms * outputs - ridge * width * (terms + outputs)
    return ridge * width * terms * outputs / left if left > 0 else None


def compute_attention_intensity(
    seq: float, queries: float, keys: float, share: float, width: float
) -> float:
    """Return the intensity of fused attention, whose scores stay on the chip: 2 s^2 q c FLOPs, and
    everything is read or written once: 2 s q c / (w (q + k)).

    Source: Dao 2023, "FlashAttention-2", where the queries of a block see keys that are in fast
    memory.

    Args:
        seq: Tokens of a sample (s).
        queries: Elements of a token's queries and of its outputs together (q).
        keys: Elements of a token's keys and values together (k).
        share: The part of the scores that is computed (c), half with a causal mask.
        width: Bytes of a value (w).
    """
    return 2.0 * seq * queries * share / (width * (queries + keys))


def find_attention_seq(
    ridge: float, queries: float, keys: float, share: float, width: float
) -> float:
    """Return the tokens of a sample at which fused attention reaches the ridge R:
    s = R w (q + k) / (2 q c).

    Args:
        ridge: FLOPs per byte.
        queries, keys, share, width: As in `compute_attention_intensity`.
    """
    return ridge * width * (queries + keys) / (2.0 * queries * share)


def find_hiding_batch(intensity: float, ridge: float, batch: float) -> float:
    """Return the batch at which transfers that a step makes once are as long as its compute, which
    grows with the batch: B R / I. From there on the link is no longer the limit.

    Args:
        intensity: FLOPs per byte moved with the batch `batch` (I).
        ridge: FLOPs of the chip in the time of one byte on the link (R).
        batch: Samples (B).
    """
    return batch * ridge / intensity


def find_hiding_tensor_size(intensity: float, ridge: float, ranks: float) -> float:
    """Return the tensor ranks up to which the products of a block are as long as their transfers.

    A rank has 1/t of the FLOPs and moves (t-1)/t of the rows, so the intensity is c / (t - 1), with
    a constant c: t = 1 + I (t0 - 1) / R.

    Args:
        intensity: FLOPs per byte with `ranks` ranks (I).
        ridge: FLOPs of the chip in the time of one byte on the link (R).
        ranks: Tensor ranks (t0), more than 1.
    """
    return 1.0 + intensity * (ranks - 1.0) / ridge


def find_hiding_seq(seq: float, intensity: float, doubled: float, ridge: float) -> float | None:
    """Return the tokens of a sample at which compute hides what is moved for each token. The FLOPs
    of a token are f + h s, because of attention, so the intensity is a line in s, which two points
    determine: s + (R - I(s)) s / (I(2s) - I(s)). None if it does not grow.

    Args:
        seq: Tokens of a sample (s).
        intensity: FLOPs per byte with samples of this length, I(s).
        doubled: The same with samples twice as long, I(2s).
        ridge: FLOPs of the chip in the time of one byte on the link (R).
    """
    if doubled <= intensity:
        return None
    return seq + (ridge - intensity) * seq / (doubled - intensity)
