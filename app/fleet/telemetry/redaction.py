"""Redaction: no secret leaves the process in a log line, a run's error and tracebacks, a problem or a `doctor` report.

Every text for people passes through `redact` before it is formatted, so that a line of JSON stays valid. A secret is
found in two ways:

    by value    `remember` stores each secret of the settings (`SecretStr`) when the settings are read. It is replaced
                wherever it appears as a whole word, percent-encoded or not.
    by shape    Passwords in addresses; `password=…` and `"password": "…"` under all usual names of secrets; bearer
                tokens; and the parameters that SQLAlchemy appends to the text of a database error.

`describe` turns an exception into one bounded line: its class and its text, redacted. Of a database error it keeps only
the server's main message, because the statement and the row's values are for the log and not for all readers of runs.
It never raises, whatever the exception's own `__str__` does.

Not guaranteed: a secret that is neither a setting nor has one of these shapes is not recognised. A secret with fewer
than `MIN_SECRET` characters is only hidden by its shape, because it may be part of ordinary words.
"""

import re
from collections.abc import Iterable
from urllib.parse import quote, unquote

import psycopg
from sqlalchemy.exc import StatementError

MIN_SECRET = 6
HIDDEN = "***"
# Characters of a text that `describe` keeps.
MAX_DESCRIPTION = 10_000
# Characters of a text that are searched, half of them at its end. The middle of a longer text is dropped: an action may
# raise an error with a text of 50 MB, and the search would block the event loop for a third of a second.
MAX_SEARCHED = 32_000

_NAMES = (
    r"(?:pass(?:word|wd|phrase)|pwd|secret|authorization|credentials?"
    r"|(?:api|access|private|secret|signing)[_-]?key|(?:access|refresh|auth|id|api|bearer)[_-]?token)"
)
_VALUE = r"""(?:\\+"(?:.*?)\\+"|"(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*'|(?:bearer|basic)\s+\S+|[^\s"'\\][^\s]*)"""
_SHAPES = (
    # The password of an address. The password may contain an `@`.
    (re.compile(r"(://[^:/@\s\"']*:)[^\s/?#\"'<>]*(@)"), rf"\1{HIDDEN}\2"),
    # `PGPASSWORD=…`, `password = '…'`, `"password": "…"`, also with escaped quotes.
    (re.compile(rf"({_NAMES}\\*[\"']?\s*[:=]\s*){_VALUE}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (re.compile(r"\b(bearer\s+)[A-Za-z0-9._~+/=-]{8,}", re.IGNORECASE), rf"\1{HIDDEN}"),
    (
        # Without a proper end the match extends to the end of the text, so that a text with many beginnings is
        # searched only once.
        re.compile(r"\[parameters: .*?(?:\](?=\s*(?:\(Background on|$|\n))|\Z)", re.DOTALL),
        f"[parameters: {HIDDEN}]",
    ),
)
# A text that this does not match, as most log lines, has none of the shapes.
_MAY_HAVE_SHAPE = re.compile(rf"://|{_NAMES}|bearer|\[parameters: ", re.IGNORECASE)
# The texts that SQLAlchemy appends to an error begin with one of these.
_APPENDED = ("[SQL: ", "(Background on this error at: ")

# Shared by the whole process, as the environment is, and never cleared: a secret stays a secret.
_secrets: set[str] = set()
_by_value: list[re.Pattern[str]] = []


def remember(secrets: Iterable[str]) -> None:
    """Hide these values from now on, both plain and percent-encoded."""
    for secret in secrets:
        _secrets.update(form for form in (secret, unquote(secret), quote(secret, safe="")) if len(form) >= MIN_SECRET)
    longest_first = sorted(_secrets, key=len, reverse=True)
    pattern = "|".join(re.escape(secret) for secret in longest_first)
    # Only as a whole word: the password `postgres` must not be replaced within `postgresql`.
    _by_value[:] = [re.compile(rf"(?<!\w)(?:{pattern})(?!\w)")] if pattern else []


def redact(text: str) -> str:
    """Replace every secret in a text, and drop the middle of a very long text."""
    text = clip(text)
    for pattern in _by_value:
        text = pattern.sub(HIDDEN, text)
    if _MAY_HAVE_SHAPE.search(text):
        for shape, replacement in _SHAPES:
            text = shape.sub(replacement, text)
    return text


def clip(text: str) -> str:
    """Drop the middle of a text that is longer than `MAX_SEARCHED`. All callers keep less than the remaining halves."""
    if len(text) <= MAX_SEARCHED:
        return text
    return f"{text[: MAX_SEARCHED // 2]} … ({len(text) - MAX_SEARCHED} more characters) … {text[-MAX_SEARCHED // 2 :]}"


def describe(error: BaseException) -> str:
    """Return the exception's class and text as one bounded line without secrets, statements or rows."""
    name, whole = _words(error)
    text = clip(whole)
    for appended in _APPENDED:
        text = text.partition(appended)[0].rstrip()
    text = printable(redact(" ".join(text.split())))
    if len(text) > MAX_DESCRIPTION:
        text = f"{text[:MAX_DESCRIPTION]}… ({max(len(text), len(whole)) - MAX_DESCRIPTION} more characters)"
    return f"{name}: {text}" if text else name


def printable(text: str) -> str:
    """Write control characters, line separators and lone surrogates as escapes."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(
        each if each.isprintable() else each.encode("unicode_escape", "surrogatepass").decode() for each in text
    )


def _words(error: BaseException) -> tuple[str, str]:
    """Return the class name and the text of an exception; an error of SQLAlchemy counts as its original error."""
    cause = error.orig if isinstance(error, StatementError) and error.orig is not None else error
    name = type(cause).__name__
    if isinstance(cause, psycopg.Error) and cause.diag.message_primary:
        return name, cause.diag.message_primary
    try:
        text = str(cause)
    except BaseException:  # noqa: BLE001 — the exception is the action's; its `__str__` may do anything
        return name, "(its text cannot be read)"
    return name, text
