"""The state of the world and the record of all its requests: an SQLite file that is written before each answer.

It is independent of the desk's database, and outlives all instances. One process has it open at a time.
"""

import sqlite3
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

# Requests that each upstream allows within any second.
ALLOWED = {"edgar": 10, "halts": 5, "wire": 5, "gazette": 5, "rumours": 5, "research": 10, "chat": 15}
# Entries on the page of a feed.
PAGE = 60

TABLES = """
CREATE TABLE IF NOT EXISTS filings (accession TEXT PRIMARY KEY, company TEXT, form TEXT, deal TEXT, at REAL);
CREATE TABLE IF NOT EXISTS halts (halt TEXT PRIMARY KEY, company TEXT, at REAL);
CREATE TABLE IF NOT EXISTS headlines (source TEXT, number INTEGER, headline TEXT, deal TEXT, at REAL,
                                      PRIMARY KEY (source, number));
CREATE TABLE IF NOT EXISTS requests (upstream TEXT, caller TEXT, refused INTEGER, at REAL);
CREATE INDEX IF NOT EXISTS requests_at ON requests (upstream, at);
CREATE TABLE IF NOT EXISTS charges (key TEXT PRIMARY KEY, deal TEXT, at REAL);
CREATE TABLE IF NOT EXISTS posts (post INTEGER PRIMARY KEY, kind TEXT, subject TEXT, caller TEXT, fate TEXT, at REAL,
                                  answered_at REAL);
"""
FEEDS = ("filings", "halts", "headlines", "requests", "charges", "posts")

# The result of a message: the chat refuses it, loses it without an answer, or shows it.
Fate = Literal["refused", "lost", "shown"]


class Filing(BaseModel):
    accession: str
    company: str
    form: str
    deal: str
    at: float


class Halt(BaseModel):
    halt: str
    company: str
    at: float


class Headline(BaseModel):
    source: str
    number: int
    headline: str
    deal: str
    at: float


class Request(BaseModel):
    upstream: str
    caller: str
    refused: bool
    at: float


class Charge(BaseModel):
    key: str
    deal: str
    at: float


class Post(BaseModel):
    post: int
    kind: str
    subject: str
    caller: str
    fate: Fate
    at: float
    # When the chat confirmed it to a caller that was still connected.
    answered_at: float | None


class Everything(BaseModel):
    filings: list[Filing]
    halts: list[Halt]
    headlines: list[Headline]
    requests: list[Request]
    charges: list[Charge]
    posts: list[Post]


class Record:
    def __init__(self, file: Path) -> None:
        file.parent.mkdir(parents=True, exist_ok=True)
        self._file = sqlite3.connect(file, isolation_level=None)
        self._file.row_factory = sqlite3.Row
        # It must survive its process, but not the machine.
        self._file.executescript("PRAGMA journal_mode = WAL; PRAGMA synchronous = OFF;" + TABLES)

    def close(self) -> None:
        self._file.close()

    def everything(self) -> Everything:
        return Everything.model_validate({feed: self._rows(f"SELECT * FROM {feed} ORDER BY at") for feed in FEEDS})

    # -- what appears -------------------------------------------------------------------------------------------------

    def add(self, rows: Iterable[Filing | Halt | Headline]) -> None:
        tables = {Filing: "filings", Halt: "halts", Headline: "headlines"}
        self._file.execute("BEGIN")
        for row in rows:
            self._insert(tables[type(row)], **row.model_dump())
        self._file.execute("COMMIT")

    def count(self, feed: str) -> int:
        return int(self._rows(f"SELECT count(*) AS n FROM {feed}")[0]["n"])

    def newest(self, feed: str) -> list[dict[str, Any]]:
        return self._rows(f"SELECT * FROM {feed} ORDER BY at DESC, rowid DESC LIMIT {PAGE}")

    def filing(self, accession: str) -> dict[str, Any] | None:
        return next(iter(self._rows("SELECT * FROM filings WHERE accession = ?", accession)), None)

    def headlines(self, source: str) -> list[dict[str, Any]]:
        return self._rows(f"SELECT * FROM headlines WHERE source = ? ORDER BY number DESC LIMIT {PAGE}", source)

    def known_deals(self) -> list[str]:
        """Return all deals, the newest first."""
        return [row["deal"] for row in self._rows("SELECT deal FROM filings GROUP BY deal ORDER BY min(at) DESC")]

    # -- requests -----------------------------------------------------------------------------------------------------

    def admit(self, upstream: str, caller: str) -> bool:
        """Record a request; return False if the last second already had all allowed requests."""
        now = time.time()
        lately = "SELECT at FROM requests WHERE upstream = ? AND at > ? AND NOT refused"
        admitted = len(self._rows(lately, upstream, now - 1)) < ALLOWED[upstream]
        self._insert("requests", upstream=upstream, caller=caller, refused=not admitted, at=now)
        return admitted

    def charge(self, key: str, deal: str) -> None:
        """Charge for a deal, unless this key was charged before."""
        self._insert("charges", key=key, deal=deal, at=time.time())

    def post(self, kind: str, subject: str, caller: str, fate: Fate) -> int:
        number = self._insert("posts", kind=kind, subject=subject, caller=caller, fate=fate, at=time.time())
        assert number is not None
        return number

    def answered(self, post: int) -> None:
        self._file.execute("UPDATE posts SET answered_at = ? WHERE post = ?", (time.time(), post))

    # -- SQLite -------------------------------------------------------------------------------------------------------

    def _rows(self, statement: str, *values: object) -> list[dict[str, Any]]:
        return [dict(row) for row in self._file.execute(statement, values)]

    def _insert(self, table: str, **row: object) -> int | None:
        placeholders = ", ".join("?" * len(row))
        statement = f"INSERT OR IGNORE INTO {table} ({', '.join(row)}) VALUES ({placeholders})"
        return self._file.execute(statement, tuple(row.values())).lastrowid
