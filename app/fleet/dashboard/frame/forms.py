"""The forms of the dashboard: their fields, and the token that shows that a page of the dashboard made them.

Each form has a token that is also in a cookie (SameSite=Strict): a page of another site can neither read the cookie nor
set the field. In addition, the browser's `Sec-Fetch-Site` must not name another site.
"""

import hmac
import re
import secrets
from typing import Literal
from urllib.parse import parse_qsl, urlsplit

from fastapi import Request, Response

from app.fleet.edge.problems import Forbidden, HttpError
from app.fleet.settings import FleetSettings

PATH = "/dashboard"
TOKEN = re.compile(r"[0-9a-f]{32}")
TOKEN_LIFETIME = 30 * 86400
MAX_FIELDS = 100


def form_cookie(settings: FleetSettings) -> str:
    return f"{settings.namespace}-form"


def form_token(request: Request, settings: FleetSettings) -> str:
    """Return the token of this browser's forms: the one it has, or a new one."""
    given = request.cookies.get(form_cookie(settings), "")
    return given if TOKEN.fullmatch(given) else secrets.token_hex(16)


async def fields(request: Request) -> dict[str, str]:
    """Return the fields of a form."""
    if request.headers.get("content-type", "").partition(";")[0].strip() != "application/x-www-form-urlencoded":
        return {}
    try:
        return dict(parse_qsl((await request.body()).decode(), keep_blank_values=True, max_num_fields=MAX_FIELDS))
    except ValueError:
        raise HttpError("this is not a form of the dashboard: load the page again") from None


async def check_form(request: Request, settings: FleetSettings) -> None:
    """Refuse a form that a page of another site has made."""
    given, own = (await fields(request)).get("token", ""), request.cookies.get(form_cookie(settings), "")
    site, origin = request.headers.get("sec-fetch-site"), request.headers.get("origin")
    if site is None and origin is not None:
        site = "same-origin" if urlsplit(origin).netloc == request.headers.get("host") else "cross-site"
    is_ours = TOKEN.fullmatch(given) and TOKEN.fullmatch(own) and hmac.compare_digest(given, own)
    if site not in {None, "same-origin"} or not is_ours:
        raise Forbidden("this form does not come from a page of the dashboard, or is too old: load the page again")


def keep_token(request: Request, response: Response, settings: FleetSettings, token: str) -> None:
    """Give the browser the cookie with its token, unless it has it."""
    if request.cookies.get(form_cookie(settings)) != token:
        set_cookie(response, settings, form_cookie(settings), token, TOKEN_LIFETIME, "strict")


def set_cookie(
    response: Response,
    settings: FleetSettings,
    name: str,
    value: str,
    lifetime: int,
    same_site: Literal["lax", "strict"],
) -> None:
    response.set_cookie(name, value, lifetime, path=PATH, secure=settings.production, httponly=True, samesite=same_site)
