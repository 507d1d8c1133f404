"""What the HTTP endpoint of a model answers to bodies that are no requests, and to clients that mean no good."""

from __future__ import annotations

import json
import socket
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest
from torch import nn
from werkzeug.test import Client

from shardrec.trainer.data import Feature, FeatureSpec
from shardrec.trainer.run.endpoint import Endpoint, open_server
from tests.trainer.run.servers import stop


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"", "the body is not JSON"),
        (b'{"rows": [{"x": 1}', "the body is not JSON"),
        (b"\xff", "the body is not JSON"),
        (b"[" * 100_000, "the body is not JSON"),
        (b'{"rows": [{"x": 1' + b"0" * 5000 + b"}]}", "the body is not JSON"),
        (b"[]", 'the single field "rows"'),
        (b'{"rows": [{"x": 1, "u": "\\ud800"}]}', "row 0: field 'u': value '\\ud800' is not a text"),
        (b'{"rows": [{"x": 1e39, "u": null}]}', "row 0: field 'x': value '999999999999999"),
    ],
)
def test_a_body_that_is_no_request(body: bytes, words: str) -> None:
    spec = FeatureSpec(features=(Feature(name="x", kind="dense"), Feature(name="u", kind="id", rows=9)))
    answer = Client(Endpoint(nn.Identity(), spec, {})).post("/predict", data=body)
    assert (answer.status_code, list(answer.get_json())) == (400, ["error"])
    assert words in answer.get_json()["error"]


class Slow(nn.Module):
    """A model that computes when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.begins, self.may_go_on = threading.Event(), threading.Event()

    def forward(self, dense: Any, sparse: Any) -> Any:
        self.begins.set()
        assert self.may_go_on.wait(60)
        return dense[:, :1]


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[tuple[str, int], Slow]]:
    """A server with one thread for the model, 20 connections and a long description; its address, and its model."""
    for name, value in (("_CONNECTIONS", 20), ("_MAX_BYTES", 1 << 16), ("_THREADS", 1)):
        monkeypatch.setattr(f"shardrec.trainer.run.endpoint.{name}", value)
    spec, model = FeatureSpec(features=(Feature(name="u", kind="id", rows=9),)), Slow()
    server = open_server(Endpoint(model, spec, {"text": "x" * (8 << 20)}), "127.0.0.1", 0)
    thread = threading.Thread(target=server.run)
    thread.start()
    yield ("127.0.0.1", int(server.effective_port)), model
    model.may_go_on.set()
    stop(server, thread)


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A request has a second to arrive."""
    monkeypatch.setattr("shardrec.trainer.run.endpoint._REQUEST_S", 1)


def check_health(address: tuple[str, int]) -> None:
    with urllib.request.urlopen(f"http://{address[0]}:{address[1]}/health", timeout=60) as answer:
        assert json.load(answer) == {"status": "ok"}


def test_connections_that_wait_are_few_and_give_way(served: tuple[tuple[str, int], Slow]) -> None:
    address, _ = served
    threads = threading.active_count()
    silent = [socket.create_connection(address, timeout=60) for _ in range(100)]
    for connection in silent[::2]:
        connection.sendall(b"POST /predict HTTP/1.1\r\nContent-Le")
    check_health(address)
    assert threading.active_count() == threads
    assert [connection.recv(1) for connection in silent[1:80:2]] == [b""] * 40  # those that came first
    for connection in silent:
        connection.close()


def test_a_request_that_the_model_computes_is_not_closed_for_others(served: tuple[tuple[str, int], Slow]) -> None:
    address, model = served
    idle = [socket.create_connection(address, timeout=60) for _ in range(20)]
    body = b'{"rows": [{"u": 1}]}'
    head = f"POST /predict HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    asking = socket.create_connection(address, timeout=60)
    asking.sendall(head + body)
    assert model.begins.wait(60)
    later = [socket.create_connection(address, timeout=60) for _ in range(60)]
    check_health(address)
    model.may_go_on.set()
    assert asking.recv(1000).startswith(b"HTTP/1.1 200 ")
    for connection in (*idle, asking, *later):
        connection.close()


@pytest.mark.parametrize("byte", [b"x", b"\r\n\r\n"])
def test_a_client_that_sends_now_and_then_a_byte(
    byte: bytes, impatient: None, served: tuple[tuple[str, int], Slow]
) -> None:
    with (
        socket.create_connection(served[0], timeout=60) as connection,
        pytest.raises((BrokenPipeError, ConnectionError)),
    ):
        for _ in range(200):
            connection.sendall(byte)
            time.sleep(0.05)


def test_a_client_that_reads_now_and_then_a_byte(impatient: None, served: tuple[tuple[str, int], Slow]) -> None:
    with socket.socket() as connection:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # the answer is longer than all buffers
        connection.connect(served[0])
        connection.sendall(b"GET / HTTP/1.1\r\nHost: x\r\n\r\n")
        with pytest.raises((BrokenPipeError, ConnectionError)):
            for _ in range(200):
                connection.recv(1)
                connection.sendall(b"x")
                time.sleep(0.05)


@pytest.mark.parametrize("header", ["Transfer-Encoding: chunked", f"Content-Length: {200 << 20}"])
def test_a_body_without_end(served: tuple[tuple[str, int], Slow], header: str) -> None:
    """It is refused after as much as a request may have, and not read to its end."""
    with socket.create_connection(served[0], timeout=60) as connection:
        connection.sendall(f"POST /predict HTTP/1.1\r\nHost: x\r\n{header}\r\n\r\n".encode())
        sent, chunk = 0, b"10000\r\n" + bytes(1 << 16) + b"\r\n"
        try:
            while sent < 200 << 20:
                sent += connection.send(chunk)
            answer = b""
        except (BrokenPipeError, ConnectionResetError):
            answer = b"closed"
        assert sent < 100 << 20, answer


def test_the_refusal_is_told(served: tuple[tuple[str, int], Slow]) -> None:
    with socket.create_connection(served[0], timeout=60) as connection:
        body = b"10001\r\n" + bytes(1 + (1 << 16)) + b"\r\n"
        connection.sendall(b"POST /predict HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
        assert connection.recv(100).startswith(b"HTTP/1.1 413 ")


def test_health_is_told_while_the_model_computes(served: tuple[tuple[str, int], Slow]) -> None:
    (host, port), model = served
    ask = urllib.request.Request(f"http://{host}:{port}/predict", b'{"rows": [{"u": 1}]}')
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(json.load(urllib.request.urlopen(ask, timeout=60))))
    asking.start()
    assert model.begins.wait(60)
    check_health((host, port))  # no other thread is left for predictions
    model.may_go_on.set()
    asking.join()
    assert answers == [{"probabilities": [pytest.approx(0.731, abs=1e-3)]}]
