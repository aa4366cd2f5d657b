"""Completions in the form of OpenAI's API: what they say is what the model says, and what they
refuse."""

import json

import pytest
from chat_models import make_chat_model

from megaframe.errors import UserError
from megaframe.inference.completions import CHATS, PROMPTS, Completion, read_request

MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("served"))


def ask(model, path, /, **keys):
    return Completion(model, read_request(path, json.dumps(keys).encode(), 50), "own")


def read_events(completion):
    *events, done = b"".join(completion.stream()).decode().split("\n\n")[:-1]
    assert done == "data: [DONE]"
    return [json.loads(event.removeprefix("data: "))["choices"][0] for event in events]


@pytest.mark.parametrize("prompt", ["ab", None])
def test_a_completion_is_what_the_model_says_after_the_prompt(model, prompt):
    said = "".join(model.generate(prompt, tokens=6, seed=3, top_k=0))
    assert said.startswith(prompt or "")
    keys = {"prompt": prompt, "max_tokens": 6, "seed": 3}
    answer = ask(model, PROMPTS, **keys).read()
    (choice,) = answer["choices"]
    if prompt is not None:
        assert prompt + choice["text"] == said
    assert (choice["finish_reason"], answer["usage"]) == ("length", {"completion_tokens": 6})
    *events, last = read_events(ask(model, PROMPTS, **keys, stream=True))
    assert "".join(event["text"] for event in events) == choice["text"]
    assert len(events) > 1 and last["finish_reason"] == "length"
    assert {event["finish_reason"] for event in events} == {None}


def test_a_chat_is_answered_as_by_the_model(model):
    said = "".join(model.chat(MESSAGES, tokens=5, seed=3, top_k=0))
    keys = {"messages": MESSAGES, "max_tokens": 5, "seed": 3}
    answer = ask(model, CHATS, **keys, model="own", user="me").read()
    assert answer["object"] == "chat.completion"
    assert answer["choices"][0]["message"] == {"role": "assistant", "content": said}
    events = read_events(ask(model, CHATS, **keys, stream=True))
    assert "".join(event["delta"]["content"] for event in events) == said


@pytest.mark.parametrize(
    ("path", "keys", "expected"),
    [
        (PROMPTS, {"prompt": "a", "max_tokens": 51}, "max_tokens 51 is above 50"),
        (PROMPTS, {"prompt": "a", "max_tokens": -1}, "max_tokens: .*greater than"),
        (PROMPTS, {"prompt": "a", "n": 2}, "n: Extra inputs"),
        (PROMPTS, {"prompt": 3}, "prompt: .*valid string"),
        (PROMPTS, {"messages": MESSAGES}, "/v1/completions takes a prompt and no messages"),
        (CHATS, {"prompt": "a"}, "/v1/chat/completions takes messages"),
        (CHATS, {"messages": [{"role": "you", "content": ""}]}, r"messages\.0\.role"),
        (PROMPTS, {"prompt": "a", "temperature": -1}, "temperature -1 is not"),
        (PROMPTS, {"prompt": "a" * 100}, "prompt has 10[01] tokens"),
    ],
)
def test_what_cannot_be_answered_is_refused_before_it_is_tried(model, path, keys, expected):
    with pytest.raises(UserError, match=expected):
        ask(model, path, **keys)


@pytest.mark.parametrize("body", [b"", b"[1]", b"{" * 10**5, b"\xff", b'"' + b"a" * 2**20])
def test_what_is_no_request_is_refused(body):
    with pytest.raises(UserError):
        read_request(PROMPTS, body, 50)


def test_an_error_after_the_first_token_is_an_event(model, monkeypatch):
    completion = ask(model, PROMPTS, prompt="a", max_tokens=5, stream=True)

    def fail():
        yield "b"
        raise UserError("the scores are not finite")

    completion._pieces = fail()
    *_, last = b"".join(completion.stream()).decode().split("\n\n")[:-1]
    assert (
        json.loads(last.removeprefix("data: "))["error"]["message"] == "the scores are not finite"
    )
