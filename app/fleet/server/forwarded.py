"""Proxies: whose `X-Forwarded-For` and `X-Forwarded-Proto` are believed.

Every client can send these headers, so they count only from the peers in `FLOTILLA_TRUSTED_PROXIES`. From such a peer,
the client of the request is the rightmost address in `X-Forwarded-For` that is not itself a trusted proxy: each proxy
appends the address that has connected to it, and the addresses to the left of it may be forged. From any other peer,
the client is the peer, and the scheme is the one of the connection.

`request.state.proxy` is the address of the trusted proxy that has passed the request on, or None. A sign-in that
believes a header of a proxy must check it: `request.client` is the client's own address by then.

uvicorn has its own setting (`--forwarded-allow-ips`, by default this machine). It is taken out when the instance
starts (`Server.keep_peers`), so that the rule is the same however the instance is started.
"""

from collections.abc import Sequence

from starlette.types import ASGIApp, Receive, Scope, Send
from uvicorn.middleware.proxy_headers import ProxyHeadersMiddleware


class TrustedProxies:
    def __init__(self, app: ASGIApp, trusted: Sequence[str]) -> None:
        # As networks: uvicorn compares anything else, such as a name, literally.
        networks = [each if "/" in each else f"{each}/{128 if ':' in each else 32}" for each in trusted]
        self._middleware = ProxyHeadersMiddleware(app, trusted_hosts=networks)  # type: ignore[arg-type]  # both are ASGI

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        host, _ = scope.get("client") or (None, None)
        trusted = host in self._middleware.trusted_hosts
        scope.setdefault("state", {})["proxy"] = host if trusted else None
        await self._middleware(scope, receive, send)  # type: ignore[arg-type]
