"""Starts the server of the live page."""

import socket
from collections.abc import Callable
from types import FrameType

import uvicorn

from perilune.control.runs.experiments import Control
from perilune.serve.address import bind_socket, load_token, server_url
from perilune.ui.live.app import make_app


def serve_pages(
    control: Control, host: str, port: int, token_env: str, announce: Callable[[str], None]
) -> None:
    """Serve until SIGTERM or Ctrl-C. Calls `announce` with the URL once the server answers.

    Raises:
        RequestError: when the address is not free, or the server would listen on a public address without a
            token.
    """
    token = load_token(host, token_env)
    with bind_socket(host, port) as listener:
        app = make_app(control, token)
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, server_header=False, timeout_graceful_shutdown=3
        )
        _Server(config, lambda: announce(server_url(listener))).run(sockets=[listener])


class _Server(uvicorn.Server):
    """A uvicorn server that announces its start, and ends its streams on SIGTERM or Ctrl-C."""

    def __init__(self, config: uvicorn.Config, announce: Callable[[], None]) -> None:
        super().__init__(config)
        self._announce = announce

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Start to answer, and announce the URL."""
        await super().startup(sockets)
        self._announce()

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """End the streams, which would never end by themselves, then stop."""
        self.config.app.state.closing = True  # type: ignore[union-attr]
        self.force_exit = self.should_exit
        self.should_exit = True
