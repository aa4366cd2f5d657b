"""Loading a config: files, `extends`, overrides, and all mistakes at once with their places."""

import os
from pathlib import Path

import pytest

from megaframe.config import RunConfig, dump, load
from megaframe.config.read import MAX_BYTES, MAX_MISTAKES
from megaframe.errors import UserError
from megaframe.io.untrusted import MAX_DEPTH


@pytest.fixture
def write(tmp_path):
    def write(name, text):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
        return str(path)

    return write


def list_mistakes(path, overrides=()):
    """Return the lines of the error message, without its headline."""
    with pytest.raises(UserError) as refusal:
        load(path, overrides)
    headline, *lines = str(refusal.value).split("\n  ")
    assert headline.startswith(f"{len(lines)} mistake")
    return lines


def test_without_a_file_there_are_the_defaults(write):
    assert load(None) == RunConfig() == load(write("empty.yaml", "")) == load(write("c.yaml", "#"))


def test_the_type_of_the_field_decides_what_a_scalar_means():
    config = load(
        None,
        [
            "optim.lr=1e-4",
            "run.dir=007",
            "model.bias=yes",
            "train.steps=12",
            "checkpoint.resume=latest",
            "model.window=null",
            "metrics.wandb=",
            "data.tokenizer=sentencepiece:runs/a b.model",
            "data.sources=[{path: x}, {path: 1e5, weight: 2}]",
            "data.split=[.9, 0.1, 0]",
            "model.rotary_scaling.kind=yarn",
        ],
    )
    assert (config.optim.lr, config.run.dir, config.model.bias) == (1e-4, "007", True)
    assert (config.train.steps, config.checkpoint.resume) == (12, "latest")
    assert (config.model.window, config.metrics.wandb) == (None, None)
    assert config.data.tokenizer == "sentencepiece:runs/a b.model"
    assert [(s.path, s.weight) for s in config.data.sources] == [("x", 1.0), ("1e5", 2.0)]
    assert config.data.split == (0.9, 0.1, 0.0)
    assert config.model.rotary_scaling.kind == "yarn"


def test_a_source_may_be_its_path_alone(write):
    file = write("c.yaml", "data:\n  sources:\n    - a b\n    - {path: c, weight: 2}\n    - 007\n")
    whole = "[{path: a b}, {path: c, weight: 2}, {path: '007'}]"
    config = load(file)
    assert config == load(None, ["data.sources=[a b, {path: c, weight: 2}, 007]"])
    assert config == load(None, [f"data.sources={whole}"])
    assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_a_window_is_a_number_or_a_list_and_is_saved_as_it_was_given():
    for text, window in (("8", 8), ("[8, null]", (8, None)), ("[8]", (8,)), ("null", None)):
        config = load(None, [f"model.window={text}"])
        assert config.model.window == window
        assert RunConfig.model_validate_json(config.model_dump_json()) == config


def test_derived_sizes_follow_the_keys_that_were_given():
    model = load(None, ["model.hidden=96", "model.heads=4", "model.bias=true"]).model
    assert (model.kv_heads, model.head_dim, model.ffn, model.qkv_bias) == (4, 24, 384, True)


def test_extends_merges_section_by_section_and_later_files_win(write):
    write("base/far.yaml", "train: {steps: 1, seq: 11, microbatch: 5}\nmodel: {layers: 3}\n")
    write("base/near.yaml", "extends: far.yaml\ntrain: {steps: 2}\n")
    write("other.yaml", "train: {seq: 33}\n")
    path = write("run.yaml", "extends: [base/near.yaml, other.yaml]\nmodel: {heads: 6}\n")
    config = load(path, ["train.microbatch=7"])
    assert (config.train.steps, config.train.seq, config.train.microbatch) == (2, 33, 7)
    assert (config.model.layers, config.model.heads) == (3, 6)


def test_extends_takes_the_name_of_a_shipped_config_too(write):
    path = write("run.yaml", "extends: llama3-8b\ntrain: {steps: 7}\n")
    expected = load("llama3-8b", ["train.steps=7"])
    assert load(path) == expected and expected.model.layers == 32
    both = write("both.yaml", "extends: [llama3-8b, near.yaml]\n")
    write("near.yaml", "extends: run.yaml\nmodel: {layers: 3}\n")
    assert load(both).model.layers == 3 and load(both).train.steps == 7
    write("llama3-8b", "model: {layers: 5}\n")  # as for --config, a file that is there comes first
    assert load(path).model.layers == 5


def test_a_folder_with_the_name_of_a_shipped_config_is_none(write, monkeypatch):
    path = write("run.yaml", "extends: demo\n")
    expected = load("demo")
    monkeypatch.chdir(Path(write("demo/metrics.jsonl", "")).parents[1])
    assert load(path) == load("demo") == expected


def test_a_name_of_no_config_is_said_with_the_nearest(write):
    (line,) = list_mistakes(write("run.yaml", "extends: lama3-8b\n"))
    assert "extends: there is no file" in line
    assert "and no shipped config lama3-8b; use llama3-8b, " in line
    (line,) = list_mistakes(write("run.yaml", "extends: folder/demo\n"))
    assert "no shipped config" not in line


def test_a_list_is_replaced_whole_and_null_ends_a_section(write):
    write("base.yaml", "data: {sources: [{path: a}, {path: b}]}\ntrain: {batch_ramp: {start: 1}}\n")
    path = write("run.yaml", "extends: base.yaml\ndata: {sources: [{path: c}]}\n")
    config = load(path, ["train.batch_ramp=null"])
    assert [source.path for source in config.data.sources] == ["c"]
    assert config.train.batch_ramp is None
    options = ["train.batch_ramp={start: 2, increment: 3}", "train.batch_ramp.samples=4"]
    ramp = load(path, ["train.batch_ramp=null", *options]).train.batch_ramp
    assert (ramp.start, ramp.increment, ramp.samples) == (2, 3, 4)


def test_a_circle_of_extends_is_named(write):
    write("b.yaml", "train: {steps: 1}\nextends: a.yaml\n")
    path = write("a.yaml", "extends: b.yaml\n")
    (line,) = list_mistakes(path)
    assert line.endswith("b.yaml:2: extends: a.yaml goes in a circle: a.yaml -> b.yaml -> a.yaml")


def test_extends_that_fan_out_are_bounded(write):
    for level in range(20):
        names = f"[x{level + 1}.yaml, y{level + 1}.yaml]" if level < 19 else "[]"
        write(f"x{level}.yaml", f"extends: {names}\n")
        write(f"y{level}.yaml", f"extends: {names}\n")
    assert (
        "more than 64 files" in list_mistakes(write("run.yaml", "extends: [x0.yaml, y0.yaml]\n"))[0]
    )


def test_every_mistake_comes_at_once_with_its_place(write):
    write("base.yaml", "optim:\n  lr: fast\n")
    path = write(
        "run.yaml",
        "extends: [base.yaml, gone.yaml]\n"
        "train:\n"
        "  stesp: 5\n"
        "  global_batch: 1e6\n"
        "  seq: 5\n"
        "  seq: 6\n"
        "model:\n"
        "  heads: 0\n"
        "  rotary_scaling: {kind: yran}\n"
        "trian: {steps: 4}\n"
        "optim: 5\n"
        "data:\n"
        "  split: [0.5, 2, 0]\n"
        "  sources:\n"
        "    - path: x\n"
        "      weight: -1\n"
        "    - pth: b\n",
    )
    lines = list_mistakes(path, ["train.steps=yes", "foo", "run.dir=@x", "data.sources.path=x"])
    ends = [
        "base.yaml:2: optim.lr=fast: takes a number > 0",
        "run.yaml:1: extends: there is no file",
        "run.yaml:3: train.stesp: unknown key; did you mean train.steps?",
        "run.yaml:4: train.global_batch=1e6: takes a whole number >= 1; write 1000000",
        "run.yaml:6: train.seq: given twice, first on line 5",
        "run.yaml:8: model.heads=0: takes a whole number >= 1",
        "run.yaml:9: model.rotary_scaling.kind=yran: takes one of none, linear, dynamic, llama3, ",
        "run.yaml:10: trian: unknown key; did you mean train?",
        "run.yaml:11: optim: is a section; give its keys, such as optim.name",
        "run.yaml:13: data.split.1=2: takes a number from 0 to 1",
        "run.yaml:16: data.sources.0.weight=-1: takes a number > 0",
        "run.yaml:17: data.sources.1.path: missing; it takes text",
        "run.yaml:17: data.sources.1.pth: unknown key; did you mean data.sources.path?",
        "command line: train.steps=yes: takes a whole number >= 1",
        "command line: 'foo' is not of the form section.key=value",
        "command line: run.dir: not valid YAML: found character '@' that cannot start any token",
        "command line: data.sources.path: data.sources has no keys beneath it; it takes a list",
    ]
    for end, line in zip(ends, lines, strict=True):
        assert end in line


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("optim.lr=nan", "optim.lr=nan: takes a number > 0"),
        ("optim.lr=inf", "optim.lr=inf: takes a number > 0"),
        ("optim.clip=-.5", "optim.clip=-.5: takes a number >= 0"),
        ("model.dropout=1", "model.dropout=1: takes a number >= 0 and < 1"),
        ("parallel.zero=4", "parallel.zero=4: takes a whole number from 0 to 3"),
        ("train.steps=1.5", "train.steps=1.5: takes a whole number >= 1"),
        ("train.steps=", "train.steps=null: takes a whole number >= 1"),
        ("train.steps=[1]", "train.steps=[1]: takes a whole number >= 1"),
        ("run.dir=null", "run.dir=null: takes text"),
        ("run.dir={a: b}", "run.dir={a: b}: takes text"),
        ("data.split=[1, 0]", "data.split=[1, 0]: takes a list of 3, each a number from 0 to 1"),
        ("data.split=[1, 0, 0, 0]", "takes a list of 3"),
        ("data.sources=x", "data.sources=x: takes a list, each {path: text"),
        ("data.sources=x", "or only its path; write [x]"),
        ("run.extensions=a.py", "takes a list, each text; write [a.py]"),
        ("data.sources=[[x]]", "data.sources.0=[x]: takes {path: text"),
        ("data.sources=[x, {weight: 2}]", "data.sources.1.path: missing; it takes text"),
        (
            "data.sources=[{path: x, split: [0.5, 2, 0]}]",
            "data.sources.0.split.1=2: takes a number from 0 to 1",
        ),
        ("data.sources=[{path: a, path: b}]", "path: given twice"),
        ("train.batch_ramp.start=4", "train.batch_ramp.increment: missing"),
        ("train.batch_ramp=4", "train.batch_ramp: is a section"),
        ("model.window=0", "model.window=0: takes a whole number >= 1 or null"),
        ("model.window=[4, 0]", "model.window=[4, 0]: takes a whole number >= 1 or null or a list"),
        ("model.window=[[4]]", "model.window=[[4]]: takes a whole number >= 1 or null or a list"),
        ("model.window=1e3", "a list, each a whole number >= 1 or null; write 1000"),
        ("train.recompute_blocks=some", "blocks=some: takes a whole number >= 0 or auto or a list"),
        ("run.seed=9223372036854775808", "takes a whole number from 0 to 9223372036854775807"),
        ("train.steps=" + "9" * 5000, "train.steps=999"),
        ("run.dir=!!python/name:os.system x", "YAML tag !!python/name:os.system refused"),
        ("data.sources=[{path: !secret x}]", "YAML tag !secret refused"),
        ("run.dir=&a x", None),
        ("run.dir=[&a x, *a]", "alias *a refused"),
        ("extends=other.yaml", "extends: unknown key"),
        ("=5", "unknown key"),
        ("train=5", "train: is a section"),
    ],
)
def test_one_override(override, message):
    if message is None:
        load(None, [override])
    else:
        lines = list_mistakes(None, [override])
        assert any(line.startswith("command line: ") and message in line for line in lines)


@pytest.mark.parametrize(
    ("words", "same"),
    [
        (["optim.lr", "=", "3e-5"], ["optim.lr=3e-5"]),
        (["optim.lr=", "3e-4", "train.steps=5"], ["optim.lr=3e-4", "train.steps=5"]),
        (["train.steps=5", "optim.lr", "=3e-4"], ["train.steps=5", "optim.lr=3e-4"]),
        (["run.dir", "=", "a=b", "train.steps", "=", "5"], ["run.dir=a=b", "train.steps=5"]),
        (["metrics.wandb=", "train.steps=5"], ["metrics.wandb=null", "train.steps=5"]),
        (["run.dir=a=", "train.steps=5"], ["run.dir=a=", "train.steps=5"]),
    ],
)
def test_an_override_may_be_several_words(words, same):
    assert load(None, words) == load(None, same) != RunConfig()


@pytest.mark.parametrize(
    "words",
    [["optim.lr", "3e-4"], ["=", "5"], ["optim.lr", "="], ["optim.lr=3", "4"], ["lr", "=", "4"]],
)
def test_words_that_are_no_override_are_refused(words):
    assert all(line.startswith("command line: ") for line in list_mistakes(None, words))


def test_keys_beneath_a_section_may_be_dotted_in_a_file(write):
    assert load(write("c.yaml", "train.steps: 3\ntrain: {seq: 4}\n")).train.steps == 3
    (line,) = list_mistakes(write("d.yaml", "train.steps: 3\ntrain: {steps: 4}\n"))
    assert line.endswith("d.yaml:2: train.steps: given twice, first on line 1")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("train: [", ":1: not valid YAML"),
        ("a: b: c", ":1: not valid YAML"),
        ("- train", ":1: a config must be made of sections"),
        ("train: {}\n---\nmodel: {}", "not valid YAML: but found another document"),
        ("? [a]\n: b", ":1: a key must be plain text"),
        ("train: {steps: \x00}", "not valid YAML text"),
        ("x: &x [1]\ny: *x", ":2: not valid YAML: alias *x refused; share keys by extends"),
        ("x: &x [*x]", "alias *x refused"),
        ("x: " + "[" * (MAX_DEPTH + 1), f"nested more than {MAX_DEPTH} deep"),
        ("extends: {a: b}", "extends: takes a file name or a list of them"),
        ("run: {dir: " + "x" * MAX_BYTES + "}", f"is larger than {MAX_BYTES} bytes"),
    ],
)
def test_files_that_are_no_config(write, text, message):
    assert any(message in line for line in list_mistakes(write("c.yaml", text)))


def test_files_that_cannot_be_read(tmp_path):
    assert list_mistakes(str(tmp_path / "none.yaml")) == [
        f"{tmp_path}/none.yaml: cannot be read: No such file or directory"
    ]
    assert list_mistakes(str(tmp_path)) == [f"{tmp_path}: cannot be read: Is a directory"]
    (tmp_path / "binary.yaml").write_bytes(b"train: \xff\xfe")
    assert "binary.yaml: not valid YAML text" in list_mistakes(str(tmp_path / "binary.yaml"))[0]


def test_aliases_cannot_grow_without_bound(write):
    laughs = "a0: &a0 [x, x]\n" + "".join(
        f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]\n" for n in range(1, 60)
    )
    assert "alias *a0 refused" in list_mistakes(write("c.yaml", laughs))[0]


@pytest.mark.slow
def test_a_file_of_mistakes_is_not_read_to_its_end(write):
    keys = "".join(f"{'long' * 30}{n}: 1\n" for n in range(400))
    items = ", ".join(f"{{path: a, weight: x{n}}}" for n in range(400))
    path = write("c.yaml", f"{keys}\ndata: {{sources: [{items}]}}\n")
    assert len(list_mistakes(path)) == MAX_MISTAKES
    assert len(list_mistakes(None, [f"data.sources=[{items}]"])) == MAX_MISTAKES


def test_a_dump_names_every_key_and_reads_back(write):
    config = load(None, ["train.batch_ramp={start: 2, increment: 2, samples: 9}", "run.dir='null'"])
    assert load(write("dump.yaml", dump(config))) == config


SECRET = "Zq8-secret"
URLS = [
    f"s3://key:{SECRET}@bucket/x",
    f"https://{SECRET}@host/x",
    f"https://host/x?token={SECRET}",
    f"hf:abfs://box/x#{SECRET}",
]


@pytest.mark.parametrize("url", URLS)
@pytest.mark.parametrize(
    "text",
    [
        "run: {{dir: {}}}",
        "data: {{sources: [{{path: {}}}]}}",
        "optim: {{frozen: [a, {}]}}",
        "model: {{layers: {}}}",
        "train: {{batch_ramp: {{start: {}}}}}",
        "{}: {{x: 1}}",
        "extends: {}",
    ],
)
def test_a_secret_anywhere_is_refused_and_not_repeated(write, text, url):
    messages = list_mistakes(write("c.yaml", text.format(f"'{url}'")))
    assert messages and not any(SECRET in line for line in messages)
    for word in (url, f"run.dir='{url}'", f"{url}=1", f"data.tokenizer='{url}'"):
        messages = list_mistakes(None, [word])
        assert messages and not any(SECRET in line for line in messages)


@pytest.mark.parametrize("text", [r'"x\0"', r'"\ud800"'])
def test_what_no_name_can_hold_is_refused(write, text):
    for where in ("run: {{dir: {}}}", "data: {{sources: [{{path: {}}}]}}"):
        (line,) = list_mistakes(write("c.yaml", where.format(text)))
        assert "NUL, or half of a surrogate pair" in line
    (line,) = list_mistakes(None, [f"run.dir={text}"])
    assert "NUL, or half" in line


def test_an_argument_that_is_no_text_is_refused():
    (line,) = list_mistakes(None, [os.fsdecode(b"run.dir=\xff")])
    assert "bytes that are not UTF-8" in line and line.isprintable()


def test_a_pipe_or_a_device_is_no_config(tmp_path):
    os.mkfifo(tmp_path / "pipe.yaml")
    for path in (tmp_path / "pipe.yaml", "/dev/zero"):
        assert list_mistakes(str(path)) == [f"{path}: cannot be read: Not a regular file"]
