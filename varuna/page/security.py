"""Decides who may see the page: the token, host names, methods and headers of a request.

The server listens on loopback only, but every user and every website of this machine's browsers can reach
that. So:

    /?token=TOKEN   sets the cookie and redirects to /#TOKEN; browsers never send what follows the #
    /, /static/...  need the cookie; they hold nothing of the job
    /api/...        need the header `Authorization: Bearer TOKEN`

Browsers send cookies to every port of a host, also to the server of another user. So the cookie opens only
the empty page, and the script keeps the token in its own tab. The cookie is `SameSite=Lax`: a `Strict` one is
not sent after the redirect if a link of another site, such as a web IDE, has opened the address.
"""

import hmac
import secrets
from collections.abc import Awaitable, Callable

from aiohttp import web

from varuna.addresses import is_local_host

COOKIE = "varuna_page"
HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
    "require-trusted-types-for 'script'; trusted-types 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-store",
}
REFUSAL = "This address has no valid token. Open the address that Varuna printed last.\n"
CLOSES = "closes"
"""Key of a request whose connection is closed after the answer."""
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


class PageSecrets:
    """The random values that open the page."""

    def __init__(self) -> None:
        self.token = secrets.token_urlsafe(32)
        self.cookie = secrets.token_urlsafe(32)
        self.cookie_name = f"{COOKIE}_{secrets.token_hex(4)}"  # several servers of a host share its cookies

    def may_enter(self, request: web.Request) -> bool:
        """Return whether the URL has the token: the first request of a browser."""
        return request.path == "/" and _same(request.query.get("token", ""), self.token)

    def may_load(self, request: web.Request) -> bool:
        """Return whether the request may have a page's own files or, below /api/, the job's data."""
        if request.path.startswith("/api/"):
            return _same(request.headers.get("Authorization", ""), f"Bearer {self.token}")
        return _same(request.cookies.get(self.cookie_name, ""), self.cookie)

    def enter(self) -> web.Response:
        response = web.Response(status=303, headers={"Location": f"/#{self.token}"})
        response.set_cookie(self.cookie_name, self.cookie, path="/", httponly=True, samesite="Lax")
        return response


def _same(found: str, wanted: str) -> bool:
    return hmac.compare_digest(found.encode(errors="surrogateescape"), wanted.encode())


def access_check(keys: PageSecrets, admit: Callable[[web.Request], bool]) -> Handler:
    """Return the middleware that refuses requests without the token.

    `admit` gets all other requests, and returns whether their connection may stay open.
    """

    @web.middleware
    async def check(request: web.Request, handler: Handler) -> web.StreamResponse:
        local = is_local_host(request.headers.getall("Host", []))
        enters = local and request.method == "GET" and keys.may_enter(request)
        if not local or not (enters or keys.may_load(request)):
            is_person = local and request.method == "GET" and request.path == "/"
            refusal = web.Response(status=403, text=REFUSAL if is_person else None)
            refusal.force_close()
            return refusal
        if not admit(request):
            request[CLOSES] = True
        if request.method != "GET" or request.body_exists:
            raise web.HTTPMethodNotAllowed(request.method, ["GET"])
        return keys.enter() if enters else await handler(request)

    return check  # type: ignore[return-value]


async def add_headers(request: web.Request, response: web.StreamResponse) -> None:
    response.headers.update(HEADERS)
    response.headers["Server"] = "varuna"
    if CLOSES in request:
        response.headers["Connection"] = "close"
        response.force_close()
