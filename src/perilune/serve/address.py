"""The address that a server listens on, and the token that it requires when other machines can connect."""

import hmac
import ipaddress
import os
import socket
from collections.abc import Mapping

from perilune.errors import RequestError

MIN_TOKEN_CHARS = 16  # shorter tokens can be guessed
_LOCAL_NAMES = frozenset({"localhost", "127.0.0.1", "[::1]"})


def is_for_this_machine(headers: Mapping[bytes, bytes]) -> bool:
    """Return whether the Host header of a request names this machine.

    This check prevents DNS rebinding: a web page can point its own host name at this machine, but its
    requests then carry that name.
    """
    host = headers.get(b"host", b"").decode("latin-1").lower()
    return host in _LOCAL_NAMES or host.rpartition(":")[0] in _LOCAL_NAMES


def has_token(headers: Mapping[bytes, bytes], token: bytes) -> bool:
    """Return whether a request carries the bearer token."""
    scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
    # In constant time, so that timing reveals nothing about the token.
    return hmac.compare_digest(bearer.strip(), token) and scheme.lower() == b"bearer"


def load_token(host: str, token_env: str) -> str | None:
    """Read the bearer token that requests need from the environment; None if they need none.

    Raises:
        RequestError: when the token is not set or too short, or a public address has no token.
    """
    if not token_env:
        if not _is_loopback(host):
            raise RequestError(
                f"the server would listen on {host}, which other machines can reach, without a token",
                where="--host",
                remedy="export PERILUNE_TOKEN=$(openssl rand -hex 24), then add --token-env PERILUNE_TOKEN",
            )
        return None
    token = os.environ.get(token_env, "")
    if len(token) < MIN_TOKEN_CHARS:
        problem = f"has {len(token)} characters, and needs {MIN_TOKEN_CHARS}" if token else "is not set"
        raise RequestError(
            f"the environment variable {token_env} {problem}",
            where="--token-env",
            remedy=f"export {token_env}=$(openssl rand -hex 24)",
        )
    return token


def _is_loopback(host: str) -> bool:
    """Return whether all addresses of `host` are loopback addresses."""
    addresses = _addresses(host, 0)
    return all(ipaddress.ip_address(address[4][0]).is_loopback for address in addresses)


def _addresses(host: str, port: int) -> list[tuple[int, int, int, str, tuple[str, int]]]:
    try:
        return socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)  # type: ignore[return-value]
    except OSError as error:
        raise RequestError(
            f"{host!r} is not an address of this machine: {error.strerror}", where="--host"
        ) from None


def bind_socket(host: str, port: int) -> socket.socket:
    """Bind a socket to the address; port 0 selects a free port.

    Raises:
        RequestError: when the address is not free.
    """
    family, _, _, _, address = _addresses(host, port)[0]
    listener = socket.socket(family, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise RequestError(
            f"cannot listen on {host} port {port}: {error.strerror}",
            where="--port",
            remedy="use another port, or 0 for a free one",
        ) from None
    return listener


def server_url(listener: socket.socket) -> str:
    """Return the URL of a server that accepts connections on `listener`."""
    host, port = listener.getsockname()[:2]
    return f"http://{f'[{host}]' if ':' in host else host}:{port}"
