"""Changes valid inputs: JSON and YAML, bytes, command lines, and what lies under a name.

Folders that somebody else hands over can lead out of themselves: to `SECRETS`, files with a secret
in every form, beside the folder in which a program works.
"""

import base64
import json
import os
import struct
import sys
from copy import deepcopy
from functools import partial
from pathlib import Path

import numpy as np
import yaml

from megaframe.checkpoint.manifest import compute_checksum

SECRET = "Zq8secretofthefuzzer"
"""No output may contain it. It is in every URL of `TEXTS`."""
NUMBERS = [
    *(0, -1, 1, 2, 3, 255, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63 - 1, 2**63, 2**64, 10**30),
    *(0.5, -0.0, 1e-320, 1e308, float("inf"), float("nan"), 10**400, 10**5000),
]
TEXTS = [
    *(
        "",
        " ",
        "0",
        "-1",
        "1_000",
        "١٢٣",
        "²",
        "1e3",
        "0x10",
        "nan",
        "null",
        "true",
        "[]",
        "{}",
        "~",
    ),
    *("a" * 300, "b" * 100_000, "../../x", "/dev/zero", "/dev/null/x", "/proc/self/mem", ".", "/"),
    *(
        "name\x1b[31m\x1b]0;title\x07",
        "line\nline",
        "tab\there",
        "\u202e\u200b",
        "é" * 200,
        "%s{0}$x",
    ),
    *(f"s3://key:{SECRET}@bucket/x", f"https://{SECRET}@host/x", f"https://host/x?token={SECRET}"),
    *(
        f"https:/user:{SECRET}@host",
        f"abfs://box/x#{SECRET}",
        "file:///etc/passwd",
        "://",
        "hf:/etc",
    ),
    *("*", "&a *a", "!!python/object:os.system x", "@x", "- x", "a: b", "'", '"', "#", "0F0 0B0"),
]
SECRETS = {
    "text": f"root:{SECRET}:1\n{SECRET} 5\n",
    "value": json.dumps({"key": SECRET, SECRET: 1, "train": {SECRET: 1}, "eos_token": SECRET}),
    "lines": json.dumps({"step": 1, "loss": 2.0, "prompt": SECRET, "text": SECRET}) + "\n",
}
"""Content of the files beside the working folder, by name."""
OUTSIDE = "../outside"
NAMING = {
    "extends": "{}",
    "parallel.cluster": "{}",
    "parallel.schedule": "file:{}",
    "data.tokenizer": "hf:{}",
    "checkpoint.folder": "{}",
}
"""Keys of a config that name a file, and how."""
INDEX_HEADER = struct.Struct("<9sQBQQ")
"""Of a token file: magic, version, type, numbers of sequences and of ends of documents."""
ODD = ["nul\0", "half\ud800"]
"""What no argument can hold, but a file can."""


def draw_value(draw, depth=0):
    """Return any JSON value."""
    kind = draw.randrange(9 if depth < 3 else 7)
    if kind < 3:
        return draw.choice(NUMBERS)
    if kind < 5:
        return draw.choice([*TEXTS, *ODD])
    if kind < 7:
        return draw.choice([None, True, False, "@deep", "@deeper"])
    inside = [draw_value(draw, depth + 1) for _ in range(draw.randrange(4))]
    return inside if kind == 7 else {draw.choice(TEXTS): part for part in inside}


def change_tree(draw, root):
    """Change, remove, add, repeat, rename or exchange entries of a JSON value; return it."""
    root = {"root": root}
    for _ in range(draw.choice([1, 1, 1, 2, 3, 8])):
        places = [*_list_places(root)]
        parent, key = draw.choice(places)
        choice = draw.randrange(7)
        if choice < 3:
            parent[key] = draw_value(draw)
        elif choice == 3:
            del parent[key]
        elif choice == 4 and isinstance(parent, dict):
            parent[draw.choice(TEXTS)] = parent.pop(key)
        elif choice == 5:
            other, at = draw.choice(places)
            if at in other if isinstance(other, dict) else at < len(other):
                parent[key] = deepcopy(other[at])
        elif isinstance(parent, list):
            parent[key:key] = [parent[key]] * draw.choice([1, 2, 50])
        else:
            parent[draw.choice(TEXTS)] = draw_value(draw)
        if "root" not in root:
            root["root"] = draw_value(draw)
    return root["root"]


def _list_places(value):
    if isinstance(value, dict | list):
        for key in list(value) if isinstance(value, dict) else range(len(value)):
            yield value, key
            yield from _list_places(value[key])


def change_counts(draw, root):
    """Multiply some integers of a JSON value, as somebody would who knows what they count."""
    places = [
        (parent, key) for parent, key in _list_places({"root": root}) if type(parent[key]) is int
    ]
    for parent, key in draw.sample(places, min(len(places), draw.choice([1, 1, 2, 5]))):
        parent[key] = (parent[key] or 1) * draw.choice([1000, 10**6, 10**9, 2**31])
    return root


def change_lengths(draw, root):
    """Repeat one entry of a list of a JSON value a hundred thousand times, or fewer if it is
    long."""
    places = [(parent, key) for parent, key in _list_places({"root": root}) if type(key) is int]
    if places:
        parent, key = draw.choice(places)
        parent[key:key] = [parent[key]] * min(100_000, (1 << 22) // len(_dump(parent[key])))
    return root


def change_tokenizer(draw, description):
    """Put a chain of parts into a tokenizer.json, or a long piece, or a prefix that merges lack."""
    pattern = draw.choice([{"String": "a"}, {"Regex": "(?=a)"}, {"Regex": "(a+)+b|x*"}])
    part = draw.choice(
        [
            {"type": "Replace", "pattern": pattern, "content": draw.choice(["", "a", "aa", "éé"])},
            {"type": "Prepend", "prepend": draw.choice(["a", "a" * 10_000])},
            {"type": "Precompiled", "precompiled_charsmap": draw.choice(["", "AAAA", "CAAAAP//"])},
            {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True},
            {"type": "Split", "pattern": pattern, "behavior": "Isolated", "invert": False},
            {"type": "Strip", "content": "a", "start": draw.choice([0, 2**40]), "stop": 2},
            {"type": "FixedLength", "length": draw.choice([0, 1, 2**60])},
        ]
    )
    kinds = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "decoder": "decoders"}
    place = draw.choice([*kinds, "prefix", "piece", "added"])
    if place in kinds:
        chain = [part] * draw.choice([1, 2, 8, 40, 3000])
        description[place] = {"type": "Sequence", kinds[place]: chain}
    elif place == "prefix":
        description["model"]["continuing_subword_prefix"] = draw.choice(["#", "é" * 20])
    elif place == "piece":
        description["model"]["vocab"]["a" * draw.choice([100, 10**6])] = 5
    else:
        token = {**description["added_tokens"][0], "content": "x" * draw.choice([0, 10**6])}
        description["added_tokens"] += [{**token, "id": 1000 + number} for number in range(60)]
    return description


def write_repeated_text(draw, path):
    """Write a Parquet file of a few kilobytes, whose rows are one long text of a dictionary."""
    import pyarrow
    import pyarrow.parquet

    size, count = draw.choice([(1 << 10, 5000), (1 << 20, 512), (1 << 26, 20), (1 << 29, 512)])
    rows = pyarrow.DictionaryArray.from_arrays(pyarrow.array([0] * count), ["x" * size])
    table = pyarrow.table({"text": rows})
    options = {"store_schema": False, "write_statistics": False}
    pyarrow.parquet.write_table(table, path, compression="zstd", **options)


def plant(draw, path):
    """Put a link that leads outside, a pipe, a folder or JSON under a name that a program may read
    or write."""
    if not path.parent.is_dir() or not path.parent.resolve().is_relative_to(Path.cwd()):
        return
    if path.is_symlink() or path.is_file():
        path.unlink()
    if path.exists():
        return
    choice = draw.randrange(6)
    if choice == 0:
        os.mkfifo(path)
    elif choice == 1:
        path.mkdir()
    elif choice == 2:
        names = draw.choice(
            ["../outside/text", "/etc/passwd", "model.safetensors", "..", "x" * 300]
        )
        path.write_text(format_json({"weight_map": {"a": names}, "eos_token_id": [2**40]}))
    else:
        path.symlink_to(draw.choice([*_list_outside(path), path.name]))


def name_outside(draw, root, path):
    """Let a key of the config at `path` name a file outside; return it."""
    key = draw.choice([*NAMING])
    named = NAMING[key].format(draw.choice(_list_outside(path)))
    section, _, name = key.rpartition(".")
    inner = root.setdefault(section, {}) if section else root
    if isinstance(inner, dict):
        inner[name or key] = named
    return root


def _list_outside(path):
    """Return names outside of the working folder: files with secrets, one that is missing, and a
    folder."""
    outside = Path(OUTSIDE).resolve()
    names = [outside / name for name in (*SECRETS, "missing", "folder")]
    return [*names, *(os.path.relpath(name, path.parent.resolve()) for name in names[:2])]


def format_json(value):
    """Return JSON with nesting that no library would write."""
    text = _dump(value)
    for mark, depth in (("@deep", 200), ("@deeper", 50_000)):
        text = text.replace(f'"{mark}"', "[" * depth + "]" * depth)
    return text


def _dump(value):
    limit = sys.get_int_max_str_digits()
    sys.set_int_max_str_digits(0)
    try:
        return json.dumps(value, ensure_ascii=True)
    finally:
        sys.set_int_max_str_digits(limit)


def change_index(draw, data):
    """Change some whole numbers of the index of a token file, or what follows its header, together
    with the numbers of the header that count it."""
    head, body = INDEX_HEADER.unpack(data[: INDEX_HEADER.size]), data[INDEX_HEADER.size :]
    sequences, documents = head[3:]
    if draw.random() < 0.3:  # every sequence is there many times
        times = draw.choice([2, 1000, 100_000])
        lengths = np.frombuffer(body, "<i4", sequences).repeat(times)
        places = np.frombuffer(body, "<i8", sequences, 4 * sequences).repeat(times)
        ends = np.arange(0, len(lengths) + 1, times, np.int64)
        counts = (len(lengths), len(ends))
        parts = [part.tobytes() for part in (lengths, places, ends)]
        return INDEX_HEADER.pack(*head[:3], *counts) + b"".join(parts)
    numbers = bytearray(body)
    for _ in range(draw.choice([1, 2, 5])):
        size, first, count = draw.choice(
            [(4, 0, sequences), (8, 4 * sequences, sequences), (8, 12 * sequences, documents)]
        )
        at = first + size * draw.randrange(count)
        number = draw.choice([*NUMBERS[:14], -5, 7, 1260]) % 2 ** (8 * size)
        numbers[at : at + size] = number.to_bytes(size, "little")
    code = draw.choice([head[2], draw.randrange(10)])
    return INDEX_HEADER.pack(*head[:2], code, *head[3:]) + bytes(numbers)


def change_bytes(draw, data):
    """Flip, cut, insert, repeat and overwrite a few bytes."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 5])):
        at = draw.randrange(len(data) + 1)
        end = min(len(data), at + draw.choice([1, 2, 4, 8, 64, 1000]))
        choice = draw.randrange(7)
        if choice == 0 and at < len(data):
            data[at] ^= 1 << draw.randrange(8)
        elif choice == 1:
            del data[at:]
        elif choice == 2:
            del data[at:end]
        elif choice == 3:
            data[at:at] = draw.choice([*TEXTS, "&a [*a, *a]\n", "<<: *a\n"]).encode()
        elif choice == 4:
            data[at:at] = data[at:end] * draw.choice([1, 3, 100])
        elif choice == 5:
            number = draw.choice(NUMBERS[:14]) % 2**64
            data[at : at + 8] = number.to_bytes(8, draw.choice(["little", "big"]))
        else:
            data[at:end] = draw.randbytes(end - at)
    return bytes(data)


def change_arguments(draw, words):
    """Change, remove, repeat or add some words of a command line."""
    words = list(words)
    for _ in range(draw.choice([1, 1, 2, 4])):
        at = draw.randrange(len(words)) if words else 0
        word = draw.choice(
            [*TEXTS, *map(_show, NUMBERS), os.fsdecode(b"\xff\xfe"), "-", "--", "--x"]
        )
        choice = draw.randrange(6)
        if choice < 3 and words:
            key, equals, _ = words[at].partition("=")
            words[at] = key + equals + word if equals else word
        elif choice == 3 and words:
            del words[at]
        elif choice == 4 and words:
            words[at:at] = [words[at]]
        else:
            words[at:at] = [word]
    return [word.replace("\0", "") for word in words]


def _show(number):
    return _dump(number)


def change_file(draw, path, handed_over=False):
    """Change a file, or what lies under its name. handed_over: whether somebody else has made the
    folder, so that it may lead out of itself."""
    if draw.random() < 0.1:
        _replace(draw, path, handed_over)
        return
    data = path.read_bytes()
    kind = "bytes" if draw.random() < 0.25 else path.suffix
    (change,) = draw.choices((change_tree, change_counts, change_lengths), (70, 25, 5))
    if b"added_tokens" in data and draw.random() < 0.5:
        change = change_tokenizer
    if kind == ".parquet":
        write_repeated_text(draw, path)
        return
    if kind in (".json", ".yaml"):
        if handed_over and path.name == "config.yaml" and draw.random() < 0.2:
            change = partial(name_outside, path=path)
        change_json(draw, path, change)
    elif kind == ".jsonl":
        change_lines(draw, path)
    elif kind == ".safetensors":
        size = struct.unpack("<Q", data[:8])[0]
        head = format_json(change(draw, json.loads(data[8 : 8 + size]))).encode()
        path.write_bytes(struct.pack("<Q", len(head)) + head + data[8 + size :])
    elif kind == ".idx":
        path.write_bytes(change_index(draw, data))
    elif kind == ".tiktoken" and draw.random() < 0.5:
        line = base64.b64encode(draw.randbytes(3)) + b" %s\n" % _show(draw.choice(NUMBERS)).encode()
        path.write_bytes(data + line)
    else:
        path.write_bytes(change_bytes(draw, data))


def change_json(draw, path, change):
    """Change what a file holds; a manifest gets the checksum that an attacker would give it."""
    data = path.read_bytes()
    value = (json.loads if data[:1] == b"{" else yaml.safe_load)(data)
    is_manifest = path.name == "manifest.json"
    if is_manifest:
        del value["checksum"]
    text = format_json(change(draw, value))
    if is_manifest and text[:1] == "{":
        text = f'{{"checksum":"{compute_checksum(text[1:].encode())}",{text[1:]}'
    path.write_text(text)


def change_lines(draw, path):
    """Change some lines of JSON, or add many that each have a name of their own."""
    lines = path.read_text().splitlines()
    for at in draw.sample(range(len(lines)), min(len(lines), draw.choice([1, 3]))):
        lines[at] = (
            format_json(change_tree(draw, json.loads(lines[at]))) if lines[at][:1] == "{" else ""
        )
    if draw.random() < 0.1:
        add_names(lines)
    path.write_text("\n".join(lines) + "\n")


def add_names(lines):
    """Add metrics and samples with a name in each line that no other line has."""
    late = '{"step": %d, "time": {"%d": 1}, "ranks": {"%d": [1]}, "prompt": "%d", "text": ""}'
    lines += [late.replace("%d", str(step)) for step in range(100, 10_000)]


def _replace(draw, path, handed_over):
    """Put something else under the name of a file: a pipe would block a reader, a device never
    ends."""
    path.unlink()
    choice = draw.randrange(7)
    if choice == 0:
        os.mkfifo(path)
    elif choice == 1:
        targets = ["/dev/zero", "/dev/tty", "/proc/self/mem", "/etc/passwd", path]
        path.symlink_to(draw.choice(_list_outside(path) if handed_over else targets))
    elif choice == 2:
        path.mkdir()
    elif choice == 3:
        path.write_bytes(b"")
    elif choice == 4:
        path.write_bytes(b"x")
        os.truncate(path, draw.choice([1 << 20, 1 << 33, 1 << 42]))
    elif choice == 5:
        path.write_bytes(draw.randbytes(draw.choice([8, 100, 5000])))
