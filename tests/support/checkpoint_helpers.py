"""Helpers of the checkpoint tests: saving as several ranks, and random partitions."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from hypothesis import strategies as st
from patience import PATIENCE
from torch.distributed import HashStore

from megaframe.checkpoint import CheckpointWriter, Slice, open_checkpoint
from megaframe.checkpoint.manifest import compute_checksum
from megaframe.checkpoint.slices import index_within

FILES = ["manifest.json", "rank-00000.safetensors", "rank-00001.safetensors"]
"""What `save` of two ranks writes."""


def make_slice(name, tensor):
    return Slice(name, tuple(tensor.shape), (0,) * tensor.dim(), tensor)


def cut_slice(name, tensor, box):
    """Return the slice that covers `box` of a whole tensor, as a copy."""
    full = (tuple(0 for _ in tensor.shape), tuple(tensor.shape))
    return Slice(name, full[1], box[0], tensor[index_within(full, box)].clone())


def save(folder: Path, ranks, *, step=1, state=None, keep=9, store=None, **arguments):
    """Save as `len(ranks)` ranks in one process; `ranks[r]` is the list of slices of rank r."""
    store = store or HashStore()
    writers = [
        CheckpointWriter(
            folder,
            rank=rank,
            world=len(ranks),
            store=store,
            keep=keep,
            timeout=PATIENCE,
            **arguments,
        )
        for rank in range(len(ranks))
    ]
    for writer, slices in zip(writers, ranks, strict=True):
        writer.save(step, slices, state or {})
    for writer in writers:
        writer.wait()
    return folder / f"step-{step:08d}"


def load_all(path):
    """Return every tensor of a checkpoint, whole, in fp64."""
    with open_checkpoint(path) as checkpoint:
        out = {
            name: torch.full(tensor.shape, torch.nan, dtype=torch.float64)
            for name, tensor in checkpoint.tensors.items()
        }
        checkpoint.load([make_slice(name, tensor) for name, tensor in out.items()])
        return out


def load_weights(path):
    """Return what `load_all` does, without optimizer state."""
    return {n: tensor for n, tensor in load_all(path).items() if not n.startswith("optimizer.")}


def write_sealed(path, manifest):
    """Write a manifest with a matching checksum, as an attacker could."""
    content = json.dumps(manifest, separators=(",", ":"))[1:].encode()
    path.write_bytes(b'{"checksum":"%s",' % compute_checksum(content).encode() + content)


@st.composite
def draw_partition(draw, shape, max_cuts=5):
    """Return boxes that tile `shape`, from random cuts along random dims."""
    boxes = [(tuple(0 for _ in shape), tuple(shape))]
    for _ in range(draw(st.integers(0, max_cuts)) if shape else 0):
        offset, size = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        dim = draw(st.integers(0, len(shape) - 1))
        cut = draw(st.integers(1, max(1, size[dim] - 1)))
        if cut >= size[dim]:
            boxes.append((offset, size))
            continue
        second = tuple(at + cut * (axis == dim) for axis, at in enumerate(offset))
        boxes.append((offset, tuple(cut if a == dim else n for a, n in enumerate(size))))
        boxes.append((second, tuple(n - cut if a == dim else n for a, n in enumerate(size))))
    return boxes


shapes = st.lists(st.integers(1, 7), min_size=0, max_size=4).map(tuple)


def reheaded(path, edit):
    """Change a rank file's header, and update its size and checksum in the manifest."""
    content = path.read_bytes()
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    edit(header)
    text = json.dumps(header).encode()
    head = len(text).to_bytes(8, "little") + text
    path.write_bytes(head + content[8 + length :])
    manifest = json.loads((path.parent / "manifest.json").read_bytes())
    del manifest["checksum"]
    manifest["files"][path.name] = {"bytes": path.stat().st_size, "header": compute_checksum(head)}
    write_sealed(path.parent / "manifest.json", manifest)
