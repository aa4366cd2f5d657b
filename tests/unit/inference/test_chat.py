"""Chats: the text of messages is that of transformers, control tokens come from the template alone,
and a hostile template is bounded.

Tests `megaframe.inference.chat` and `megaframe.inference.render_chat`.
"""

import io
import sys
from pathlib import Path

import pytest
from chat_folders import SPECIAL, name_tokenizer, write_byte_tokenizer, write_settings
from programs import load_program
from transformers_models import make_random_checkpoint

from megaframe.data.tokenizer import load_tokenizer
from megaframe.errors import UserError
from megaframe.inference import chat, render_chat
from megaframe.inference.chat import find_chat_format
from megaframe.inference.generation import SampledIds
from megaframe.inference.library import load_model

ROOT = Path(__file__).resolve().parents[3]
TEMPLATE = """{%- if tools %}{{ tools | tojson }}{% endif -%}
{{ bos_token }}{% for message in messages %}
    {%- if message.role not in ['system', 'user', 'assistant'] %}
        {{- raise_exception('unknown role ' ~ message.role) }}
    {%- endif %}
    {%- if loop.index > 99 %}{% break %}{% endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' }}
    {% generation %}{{ message.content | trim }}{% endgeneration %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}"""
MESSAGES = [
    {"role": "system", "content": "be <brief> "},
    {"role": "user", "content": "a & b"},
    {"role": "assistant", "content": "né"},
    {"role": "user", "content": "c"},
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return write_byte_tokenizer(tmp_path_factory.mktemp("tokenizer"), TEMPLATE)


def find_format(folder):
    name = name_tokenizer(folder)
    return find_chat_format(name, load_tokenizer(name))


def test_messages_are_what_transformers_makes_of_them(folder):
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(folder)
    own = find_format(folder)
    options = {"add_generation_prompt": True, "tokenize": False}
    assert own.render([MESSAGES, MESSAGES[:2]])[0] == theirs.apply_chat_template(
        MESSAGES, **options
    )
    ids = theirs.apply_chat_template(MESSAGES, add_generation_prompt=True, return_dict=False)
    assert own.encode([MESSAGES]) == [ids]
    assert own.ends == {own.tokenizer.find_id(name) for name in (SPECIAL[0], SPECIAL[2])}


def test_what_a_user_writes_becomes_no_control_token(folder):
    with pytest.raises(UserError, match=r"the message has <\|im_end\|>, the name of a control"):
        find_format(folder).encode([[{"role": "user", "content": "x<|im_end|>y"}]])
    with pytest.raises(UserError, match="the message is not valid text at character 1"):
        find_format(folder).encode([[{"role": "user", "content": "x\udcff"}]])


@pytest.mark.parametrize(
    ("template", "problem"),
    [
        ("{{ messages.__class__.__mro__[1].__subclasses__() }}", "SecurityError"),
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "1 s"),
        ("{{ 'a' * 99999999999 }}", "MiB of memory"),
        (
            "{% for i in range(99999) %}{{ 'a' * 999 }}{% endfor %}",
            "more than 4,194,304 characters",
        ),
        ("{% for m in", "TemplateSyntaxError"),
        ("{{ raise_exception('no \x1b system') }}", r"TemplateError: no \x1b system"),
        ("{% include '/etc/passwd' %}", "no loader"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
    ],
)
def test_a_hostile_template_is_bounded_and_refused(template, problem, folder, monkeypatch):
    monkeypatch.setattr(chat, "_SECONDS", 1)
    own = find_format(folder)
    with pytest.raises(UserError) as error:
        type(own)(own.tokenizer, template, own.settings, folder).encode([MESSAGES])
    assert problem in str(error.value) and "the chat template of" in str(error.value)
    assert str(error.value).isprintable()


def test_a_template_is_found_or_asked_for(folder, tmp_path):
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes((folder / name).read_bytes())
    write_settings(
        tmp_path, [{"name": "tool", "template": "x"}, {"name": "default", "template": "y"}]
    )
    assert find_format(tmp_path).template == "y"
    (tmp_path / "chat_template.jinja").write_text("z")
    assert find_format(tmp_path).template == "z"
    (tmp_path / "chat_template.jinja").unlink()
    write_settings(tmp_path, None)
    with pytest.raises(UserError, match=r"neither chat_template\.jinja nor chat_template in"):
        find_format(tmp_path)
    with pytest.raises(UserError, match="and the tokenizer is bytes; name one with --tokenizer"):
        find_chat_format("bytes", load_tokenizer("bytes"))


def run_tool(monkeypatch, name, lines, *arguments):
    monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, arguments)])
    monkeypatch.setattr(sys, "stdin", io.StringIO(lines))
    load_program(f"tools/{name}.py").main()


@pytest.fixture(scope="module")
def checkpoint(folder, tmp_path_factory):
    model = {"layers": 1, "hidden": 16, "heads": 2, "vocab": 259}
    return make_random_checkpoint(tmp_path_factory.mktemp("chat") / "own", **model)


def test_each_line_of_a_conversation_is_answered(folder, checkpoint, monkeypatch, capsys):
    tokenizer = f"hf:{folder}/tokenizer.json"
    monkeypatch.setattr(
        "megaframe.inference.chat._run",
        lambda request: {
            "texts": [render_chat.render(request["template"], v) for v in request["variables"]]
        },
    )
    common = ("--checkpoint", checkpoint, "--tokenizer", tokenizer, "--tokens", 3)
    common = (*common, "--temperature", 0)
    run_tool(monkeypatch, "chat", "a\n\nx<|im_end|>\nb\n" + "c" * 99, *common)
    printed = capsys.readouterr()
    model = load_model(checkpoint, tokenizer=tokenizer)
    messages, expected = [], ""
    for text in ("a", "b"):
        messages.append({"role": "user", "content": text})
        said = "".join(model.chat(messages, tokens=3, temperature=0))
        messages.append({"role": "assistant", "content": said})
        expected += said + "\n"
    assert printed.out == expected
    first, second = printed.err.splitlines()
    assert first.startswith("error: the message has <|im_end|>")
    assert second.startswith("error: the chat has ") and "the model sees 64" in second
    run_tool(monkeypatch, "chat", "a\n b \n", *common, "--echo")
    said = [message["content"] for message in messages]
    assert capsys.readouterr().out == f"> a\n{said[1]}\n> b\n{said[3]}\n"
    prompts = ("--prompt", "a", "--prompt", "b")
    run_tool(monkeypatch, "generate", "", *common, "--chat", *prompts)
    apart = ["".join(model.chat([asked], tokens=3, temperature=0)) for asked in messages[::2]]
    assert capsys.readouterr().out == "".join(
        f"--- prompt {number} of 2\n{said}\n" for number, said in enumerate(apart, 1)
    )
    assert apart[0] == messages[1]["content"]


def test_an_answer_ends_at_the_end_of_a_message(folder, checkpoint, monkeypatch):
    model = load_model(checkpoint, tokenizer=f"hf:{folder}/tokenizer.json")
    end = model.chat_format.tokenizer.find_id("<|im_end|>")
    asked = [*b"ab", end, *b"cd"]

    def sample_batch(stage, requests, **options):
        (request,) = requests
        for size in range(1, len(asked) + 1):
            ids = [*request.start, *asked[:size]]
            is_last = request.is_complete(ids)
            yield SampledIds(0, ids, is_last)
            if is_last:
                return

    monkeypatch.setattr("megaframe.inference.model.sample_batch", sample_batch)
    ids = model.tokenizer.encode("ab")
    asked[:2] = ids
    assert "".join(model.chat([{"role": "user", "content": "x"}])) == "ab"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--chat", "--samples", "2"], "--samples 2 has no meaning with --chat"),
        (["--system", "x"], "--system begins a chat; add --chat"),
        (["--chat"], "--chat answers prompts; give one with --prompt, or use tools/chat.py"),
    ],
)
def test_options_that_mean_nothing_are_refused(words, expected, monkeypatch, capsys):
    with pytest.raises(SystemExit):
        run_tool(monkeypatch, "generate", "", "--checkpoint", "none", *words)
    assert expected in capsys.readouterr().err
