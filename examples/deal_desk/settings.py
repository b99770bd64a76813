"""How often, how much, and where: what is not said by a `DESK_…` variable is as it stands here.

The fleet's own settings begin with `FLOTILLA_`, and unknown ones of those are refused; hence another prefix.
"""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Desk(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="DESK_", frozen=True)

    # The PostgreSQL schema of the desk's tables: another one for each namespace that shares a database.
    database_schema: str = Field(default="deal_desk", pattern=r"^[a-z][a-z0-9_]{0,62}$")

    filings_every: str = "60s"
    halts_every: float = Field(default=10, gt=0)
    sources_every: str = "2m"

    # EDGAR allows ten requests a second and counts strictly: some room is left for what the network does to them.
    edgar_rate: str = "5/s"
    news_rate: str = "2/s"
    research_rate: str = "4/s"
    chat_rate: str = "7/s"

    # How long the chat may take to answer, in seconds.
    chat_patience: float = Field(default=2, gt=0)
    max_retry_delay: str = "15s"


class World(BaseSettings):
    """Of the fake upstreams."""

    model_config = SettingsConfigDict(env_prefix="DESK_WORLD_", frozen=True)

    # Where they are, if somebody has started them. Unset: one of the desk's instances has them, on loopback.
    url: str | None = None
    port: int = Field(default=8090, ge=1, le=65535)
    file: Path = Path(".flotilla/deal_desk.sqlite3")

    # So many filings appear at once, every so many seconds.
    every: float = Field(default=20, gt=0)
    bunch: int = Field(default=5, ge=1, le=50)
    # The share of the chat's messages that it refuses, and of those that it does not answer.
    refuses: float = Field(default=0.3, ge=0, le=1)
    falls_silent: float = Field(default=0.1, ge=0, le=1)

    @property
    def address(self) -> str:
        return self.url or f"http://127.0.0.1:{self.port}"


desk = Desk()
world = World()
