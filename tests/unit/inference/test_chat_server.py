"""The page to talk with a model: it streams what the model says to those who have the token.

Tests `megaframe.inference.chat_server`.
"""

import json
import socket
import threading
import time
from http import HTTPStatus
from types import SimpleNamespace
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from chat_models import make_chat_model
from patience import PATIENCE

from megaframe.errors import UserError
from megaframe.inference.chat_server import ChatServer
from megaframe.inference.generation import SamplingOptions
from megaframe.io.http import MOST_BODY

MESSAGES = [{"role": "user", "content": "ab"}]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_chat_model(tmp_path_factory.mktemp("page"))


@pytest.fixture
def serve():
    """serve(model, **options) -> a server that listens."""
    servers = []

    def start(model, **options):
        options = {"tokens": 5, "sampling": SamplingOptions(0.8), **options}
        servers.append(ChatServer(model, **options))
        servers[-1].start()
        return servers[-1]

    yield start
    for server in servers:
        server.close()


def ask(server, request, token=None):
    """Return the status and the lines of an answer."""
    body = request if isinstance(request, bytes) else json.dumps(request).encode()
    address = server.address.replace("/?", "/answer?")
    address = address if token is None else address.replace(server.token, token)
    try:
        with urlopen(Request(address, body, method="POST"), timeout=PATIENCE) as answer:
            return answer.status, [json.loads(line) for line in answer]
    except HTTPError as error:
        return error.code, error.read()


def test_an_answer_is_what_the_model_says(model, serve):
    server = serve(model)
    status, lines = ask(server, {"messages": MESSAGES, "seed": 3})
    pieces = [line["text"] for line in lines if "text" in line]
    assert status == HTTPStatus.OK and lines[-1] == {"end": True}
    assert pieces == [*model.chat(MESSAGES, tokens=5, seed=3, top_k=0)]


def test_pieces_come_before_the_answer_ends(serve):
    goes_on = threading.Event()

    def chat(messages, **options):
        yield "first"
        assert goes_on.wait(PATIENCE)
        yield "second"

    server = serve(SimpleNamespace(chat=chat))
    address = server.address.replace("/?", "/answer?")
    body = json.dumps({"messages": MESSAGES}).encode()
    with urlopen(Request(address, body), timeout=PATIENCE) as answer:
        assert json.loads(answer.readline()) == {"text": "first"}
        goes_on.set()
        assert json.loads(answer.readline()) == {"text": "second"}


def test_a_client_that_leaves_ends_its_answer_and_the_next_is_answered(serve):
    ended = threading.Event()

    def chat(messages, **options):
        try:
            while messages[-1]["content"] == "long":
                yield "x" * 4096
            yield "short"
        finally:
            ended.set()

    server = serve(SimpleNamespace(chat=chat))
    address = server.address.replace("/?", "/answer?")
    body = json.dumps({"messages": [{"role": "user", "content": "long"}]}).encode()
    with urlopen(Request(address, body), timeout=PATIENCE) as answer:
        answer.readline()
    assert ended.wait(PATIENCE)
    assert ask(server, {"messages": MESSAGES}) == (200, [{"text": "short"}, {"end": True}])


def test_what_cannot_be_answered_is_said(model, serve):
    server = serve(model)
    long = [{"role": "user", "content": "a" * 999}]
    status, (line,) = ask(server, {"messages": long})
    assert status == HTTPStatus.OK and "the model sees" in line["error"]
    control = [{"role": "user", "content": "<|im_end|>"}]
    assert "control token" in ask(server, {"messages": control})[1][0]["error"]


@pytest.mark.parametrize(
    "request_body",
    [
        b"",
        b"[" * 100_000,
        {"messages": []},
        {"messages": [{"role": "tool", "content": "x"}]},
        {"messages": [{"role": "user", "content": 1}]},
        {"messages": [{"role": "user", "content": "x", "more": 1}]},
        {"messages": MESSAGES, "seed": -1},
        {"messages": MESSAGES, "seed": True},
        {"messages": MESSAGES * 1001},
    ],
)
def test_requests_that_the_page_does_not_send_are_refused(request_body, serve):
    status, content = ask(serve(SimpleNamespace()), request_body)
    assert status == HTTPStatus.BAD_REQUEST
    assert json.loads(content)["error"].startswith(("a request is {", "the chat has 1,001"))


def test_only_who_has_the_token_is_answered(model, serve):
    server = serve(model)
    assert ask(server, {"messages": MESSAGES}, token="x")[0] == HTTPStatus.FORBIDDEN
    port = int(server.address.partition("1:")[2].partition("/")[0])
    for size in (str(MOST_BODY + 1), "9" * 5000, "-1", ""):
        with socket.create_connection(("127.0.0.1", port), PATIENCE) as line:
            head = f"POST /answer?token={server.token} HTTP/1.0\r\nContent-Length: {size}\r\n\r\n"
            line.sendall(head.encode())
            assert line.recv(99).startswith(b"HTTP/1.0 413")
    with urlopen(server.address, timeout=PATIENCE) as page:
        assert "default-src 'none'" in page.headers["Content-Security-Policy"]
        assert b"megaframe chat" in page.read()
    for address in (server.address.replace(server.token, "x"), server.address + "&a=b#"):
        other = address.replace("/?", "/other?")
        with pytest.raises(HTTPError):
            urlopen(other, timeout=PATIENCE)
    with pytest.raises(UserError, match=f"cannot listen on 127.0.0.1:{port}: .* --port"):
        serve(model, port=port)


def test_the_page_shows_a_conversation_as_it_is_said(serve, visit):
    """Enter sends; what is said is text whatever it looks like; an error leaves no message; a long
    answer is stopped, and what was said of it stays in the conversation."""
    asked, goes_on = [], threading.Event()

    def chat(messages, **options):
        asked.append(messages)
        question = messages[-1]["content"]
        if question == "bad":
            raise UserError("no answer to that")
        yield "<b>you said "
        assert goes_on.wait(PATIENCE)
        while question == "long":
            time.sleep(0.02)  # as a model takes its time, and no page can show endless text
            yield "more "
        yield question

    tab = visit(serve(SimpleNamespace(chat=chat)).address, drawn="textarea")
    tab.fill("textarea", "hello")
    tab.press("textarea", "Enter")
    tab.wait_for_selector(".assistant:has-text('you said')")
    goes_on.set()
    tab.wait_for_selector(".assistant:has-text('you said hello')")
    assert tab.text_content(".assistant") == "<b>you said hello"
    tab.wait_for_selector("button:not([id]):enabled")
    tab.fill("textarea", "bad")
    tab.press("textarea", "Enter")
    tab.wait_for_selector(".error:has-text('no answer to that')")
    tab.wait_for_selector("button:not([id]):enabled")
    tab.fill("textarea", "long")
    tab.click("button:not([id])")
    tab.wait_for_selector(".assistant:has-text('more more')")
    tab.click("#stop")
    tab.wait_for_selector("button:not([id]):enabled")
    tab.fill("textarea", "last")
    tab.press("textarea", "Enter")
    tab.wait_for_selector(".assistant:has-text('you said last')")
    said = [(message["role"], message["content"][:12]) for message in asked[-1]]
    assert said == [
        ("user", "hello"),
        ("assistant", "<b>you said "),
        ("user", "long"),
        ("assistant", "<b>you said "),
        ("user", "last"),
    ]
