"""Clients that send incomplete requests lose their own connection and disturb no other client."""

import json
import socket
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import product
from typing import Any

import psutil
import pytest
from served import CONTEXT, Served, make_checkpoint, served

MOST = 12
ASK = b"GET /health HTTP/1.1\r\nHost: localhost\r\n\r\n"
POST = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny")
    with served(folder, "--stall", "2", "--max-connections", str(MOST), "--max-body", "0.1") as server:
        yield server


def connect(server: Served) -> socket.socket:
    host, port = server.root.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=60)


def answer(client: socket.socket) -> tuple[int, Any]:
    """Read one response; returns its status and JSON document."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _more(client)
    head, _, body = received.partition(b"\r\n\r\n")
    (length,) = [
        int(line[15:]) for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")
    ]
    while len(body) < length:
        body += _more(client)
    return int(head.split()[1]), json.loads(body)


def _more(client: socket.socket) -> bytes:
    data = client.recv(65536)
    assert data, "closed"
    return data


def is_closed(client: socket.socket) -> bool:
    """Wait for data or the end; returns whether the server closed the connection."""
    try:
        return client.recv(1) == b""
    except ConnectionResetError:
        return True


def is_closed_meanwhile(client: socket.socket, pieces: list[bytes]) -> bool:
    """Whether the server closes the connection while the client sends a piece every 0.1 seconds."""
    client.settimeout(0.1)
    for piece in pieces:
        try:
            client.sendall(piece)
            return client.recv(1) == b""
        except TimeoutError:
            continue
        except ConnectionError:
            return True
    return False


def test_incomplete_head_times_out_on_first_and_later_requests(server: Served) -> None:
    halves = (b"", b"G", ASK[:-2], POST + b"Content-Length: 10\r\nX-Half: ")
    with ExitStack() as stack:
        clients = []
        for half, before in product(halves, (0, 2)):
            clients.append(client := stack.enter_context(connect(server)))
            for _ in range(before):
                client.sendall(ASK)
                assert answer(client) == (200, {"status": "ok"})
            client.sendall(half)
        assert all(map(is_closed, clients))


def test_trickling_head_times_out(server: Served) -> None:
    """Each header arrives in time, but the whole head does not."""
    with connect(server) as client:
        client.sendall(ASK + ASK[:-2])
        assert answer(client)[0] == 200
        assert is_closed_meanwhile(client, [b"X-%d: 1\r\n" % i for i in range(90)])


@pytest.mark.parametrize("path", [b"/v1/completions", b"/nowhere", b"/health"])
@pytest.mark.parametrize(
    "sized", [b"Content-Length: 10\r\n\r\n{", b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"]
)
def test_incomplete_body_gets_an_error_and_closes_the_connection(
    server: Served, path: bytes, sized: bytes
) -> None:
    with connect(server) as client:
        client.sendall(POST.replace(b"/v1/completions", path) + sized)
        status, document = answer(client)
        assert status == (408 if path == b"/v1/completions" else 404 if path == b"/nowhere" else 405)
        assert document["error"]["type"] in ("invalid_request_error", "not_found_error")
        assert is_closed_meanwhile(client, [b"x"] * 90)


@pytest.mark.parametrize(
    "head",
    [b"".join(b"X-%d: 1\r\n" % i for i in range(10_000)), b"X: " + b"x" * 200_000, b"X: 1\r\n" * 101],
    ids=["many headers", "a long header", "some headers"],
)
def test_server_refuses_large_heads(server: Served, head: bytes) -> None:
    with connect(server) as client:
        client.sendall(ASK[:-2] + head + b"\r\n\r\n")
        status, document = answer(client)
        assert status == 431 and "more than 100 headers" in document["error"]["message"]
        assert is_closed(client)


@pytest.mark.parametrize(
    "nonsense", [b"\x16\x03\x01\x02\x00", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"\0" * 99]
)
def test_malformed_http_gets_json_error(server: Served, nonsense: bytes) -> None:
    with connect(server) as client:
        client.sendall(nonsense)
        status, document = answer(client)
        assert status == 400 and document["error"]["type"] == "invalid_request_error"
        assert is_closed(client)


def test_endless_body_closes_the_connection(server: Served) -> None:
    with connect(server) as client:
        client.sendall(POST + b"Transfer-Encoding: chunked\r\n\r\n0\r\nX-Trailer: ")
        with pytest.raises(ConnectionError):
            for _ in range(10_000):
                client.sendall(b"x" * 65536)


def test_incomplete_requests_do_not_block_complete_ones(server: Served) -> None:
    """With three times as many incomplete requests as connections, a complete request gets its answer."""
    long = {
        "model": "tiny",
        "prompt": "1",
        "max_tokens": CONTEXT - 1,
        "ignore_eos": True,
        "n": 16,
        "logprobs": 5,
    }
    body = json.dumps(long).encode()
    halves = [ASK[:-2], POST + b"Content-Length: 10\r\n\r\n{", b""]
    with ExitStack() as stack, connect(server) as working:
        working.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(body) + body)
        clients = []
        for number in range(3 * MOST):
            clients.append(stack.enter_context(connect(server)))
            clients[-1].sendall(halves[number % 3])
            if number % 6 == 5:
                with server.http() as http:
                    assert http.get("/health").json() == {"status": "ok"}
        assert len(psutil.Process(server.process.pid).net_connections("tcp")) <= MOST + 8
        assert all(is_closed(client) for client in clients[:MOST])
        status, document = answer(working)
        assert status == 200 and len(document["choices"]) == 16
