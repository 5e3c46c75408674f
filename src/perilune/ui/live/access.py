"""Access control of the pages: requests from this machine, or with the token."""

import hashlib
import hmac
from urllib.parse import parse_qs

from starlette.requests import Request, cookie_parser
from starlette.responses import HTMLResponse, PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from perilune.serve.address import has_token, is_for_this_machine

COOKIE_NAME = "perilune"
LOGIN_PATH = "/token"
MAX_FORM_BYTES = 4096
SECURITY_HEADERS = (
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-resource-policy", b"same-origin"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cache-control", b"no-store"),
    (b"content-security-policy", b"frame-ancestors 'none'"),
)
LOGIN_FORM = """<!doctype html><html lang="en"><meta charset="utf-8">
<meta name="color-scheme" content="light dark">
<title>Perilune</title><form method="post" action="/token"><label>Token <input type="password" name="token"
autocomplete="current-password" required autofocus></label> <button>Open</button></form></html>"""


class Access:
    """Refuses requests without access, and adds the security headers to every answer.

    Args:
        token: token that requests need, as a bearer token or in the cookie that the login form sets; None to
            answer only requests to localhost.
    """

    def __init__(self, app: ASGIApp, *, token: str | None) -> None:
        self._app = app
        self._token = None if token is None else token.encode()
        # The cookie is derived from the token, so that a stolen cookie does not reveal it.
        self._cookie = "" if token is None else hmac.digest(token.encode(), b"perilune ui", "sha256").hex()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_secured(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *SECURITY_HEADERS]
            await send(message)

        refusal = await self._check_access(scope, receive)
        await (refusal or self._app)(scope, receive, send_secured)

    async def _check_access(self, scope: Scope, receive: Receive) -> Response | None:
        headers: dict[bytes, bytes] = dict(scope["headers"])
        if self._token is None:
            if is_for_this_machine(headers):
                return None
            return PlainTextResponse("this server only answers requests to localhost", 403)
        if has_token(headers, self._token) or self._has_cookie(headers):
            return None
        if scope["method"] == "POST" and scope["path"] == LOGIN_PATH:
            return await self._login(Request(scope, receive))
        return HTMLResponse(LOGIN_FORM, 401)

    def _has_cookie(self, headers: dict[bytes, bytes]) -> bool:
        cookies = cookie_parser(headers.get(b"cookie", b"").decode("latin-1"))
        return hmac.compare_digest(cookies.get(COOKIE_NAME, "").encode(), self._cookie.encode())

    async def _login(self, request: Request) -> Response:
        body = b""
        async for chunk in request.stream():
            body += chunk
            if len(body) > MAX_FORM_BYTES:
                return PlainTextResponse("the form is too large", 413)
        sent = parse_qs(body.decode("utf-8", "replace")).get("token", [""])[0].encode()
        if not hmac.compare_digest(
            hashlib.sha256(sent).digest(), hashlib.sha256(self._token or b"").digest()
        ):
            return HTMLResponse(LOGIN_FORM, 401)
        answer = RedirectResponse("/", 303)
        answer.set_cookie(COOKIE_NAME, self._cookie, httponly=True, samesite="strict")
        return answer
