"""Redaction: no secret leaves the process in a log line, a run's stored error, a problem or a report of `doctor`.

Every text that is written for people passes through `redact` before it is formatted, so that a line of JSON stays a
line of JSON. A secret is found in two ways:

    by value    Each secret among the settings (`SecretStr`) is remembered when the settings are read. It is replaced
                wherever it appears, percent-encoded or not, whatever stands around it.
    by shape    Passwords in addresses, `password=…` and `"password": "…"` under all names that secrets usually have,
                bearer tokens, and the parameters that SQLAlchemy appends to the text of a database error.

`describe` turns an exception into one bounded line: its class and its text, redacted. Of a database error it keeps the
server's main message alone, because the statement and the row's values belong to the log and not to every reader of
runs. It never raises, whatever the exception's own `__str__` does.

What it does not promise: a secret that is not among the settings and has no such shape is not recognised. A value of
fewer than `SHORTEST` characters is hidden by its shape alone, since it may be part of ordinary words.
"""

import re
from collections.abc import Iterable
from urllib.parse import quote, unquote

import psycopg
from sqlalchemy.exc import StatementError

SHORTEST = 6
HIDDEN = "***"
# What `describe` keeps of a text; the rest is counted.
LONGEST = 10_000
# How much of a text is looked at, half of it at its end. The middle of a longer one is left out: an action may raise an
# error of 50 MB, and looking through it takes the event loop a third of a second for each.
READ = 32_000

_NAMES = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|authorization|credentials?"
    r"|(?:api|access|private|secret|signing)[_-]?key|(?:access|refresh|auth|id|api|bearer)[_-]?token)"
)
_VALUE = r"""(?:\\+"(?:.*?)\\+"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:bearer|basic)\s+\S+|[^\s"'\\][^\s]*)"""
_SHAPES = (
    # The password of an address, which may contain an `@` of its own.
    (re.compile(r"(://[^:/@\s\"']*:)[^\s/?#\"'<>]*(@)"), rf"\1{HIDDEN}\2"),
    # `PGPASSWORD=…`, `password = '…'`, `"password": "…"`, also where the quotes are escaped.
    (re.compile(rf"({_NAMES}\\*[\"']?\s*[:=]\s*){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        # To the end if there is no proper end: no second search begins then, however many beginnings there are.
        re.compile(r"\[parameters: .*?(?:\](?=\s*(?:\(Background on|$|\n))|\Z)", re.DOTALL),
        f"[parameters: {HIDDEN}]",
    ),
)
# Texts without any of these characters or words have no such shape; most log lines do not.
_WORTH_A_LOOK = re.compile(rf"://|{_NAMES}|bearer|\[parameters: ", re.IGNORECASE)
# What SQLAlchemy appends to the text of an error begins with one of these.
_APPENDED = ("[SQL: ", "(Background on this error at: ")

# Shared by the whole process, as the environment is, and never emptied: a secret stays one.
_secrets: set[str] = set()
_by_value: list[re.Pattern[str]] = []


def remember(secrets: Iterable[str]) -> None:
    """Hide these values from now on, in both the plain and the percent-encoded form."""
    for secret in secrets:
        _secrets.update(form for form in (secret, unquote(secret), quote(secret, safe="")) if len(form) >= SHORTEST)
    longest_first = sorted(_secrets, key=len, reverse=True)
    pattern = "|".join(re.escape(secret) for secret in longest_first)
    # A whole word only: a password such as `postgres` must not tear `postgresql` apart.
    _by_value[:] = [re.compile(rf"(?<!\w)(?:{pattern})(?!\w)")] if pattern else []


def redact(text: str) -> str:
    """Replace every secret in a text, and leave out the middle of a very long one."""
    text = clip(text)
    for pattern in _by_value:
        text = pattern.sub(HIDDEN, text)
    if _WORTH_A_LOOK.search(text):
        for shape, replacement in _SHAPES:
            text = shape.sub(replacement, text)
    return text


def clip(text: str) -> str:
    """Leave out the middle of a text that is longer than `READ`. Nobody keeps as much as the halves that stay."""
    if len(text) <= READ:
        return text
    return f"{text[: READ // 2]} … ({len(text) - READ} more characters) … {text[-READ // 2 :]}"


def describe(error: BaseException) -> str:
    """Return the exception's class and text as one bounded line without secrets, statements or rows."""
    name, whole = _words(error)
    text = clip(whole)
    for appended in _APPENDED:
        text = text.partition(appended)[0].rstrip()
    text = printable(redact(" ".join(text.split())))
    if len(text) > LONGEST:
        text = f"{text[:LONGEST]}… ({max(len(text), len(whole)) - LONGEST} more characters)"
    return f"{name}: {text}" if text else name


def printable(text: str) -> str:
    """Write control characters, line separators and lone surrogates as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def _words(error: BaseException) -> tuple[str, str]:
    """Return the name of the class that says most, and the text that belongs to it."""
    cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    name = type(cause).__name__
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return name, cause.diag.message_primary
    try:
        text = str(cause)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its `__str__` may do anything
        return name, "(its text cannot be read)"
    return name, text
