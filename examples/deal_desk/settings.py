"""The settings of the desk: intervals, rates and addresses, each with a `DESK_…` variable.

The prefix differs from the fleet's `FLOTILLA_`, because the fleet refuses unknown names with its own prefix.
"""

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict


class Desk(BaseSettings):
    model_config = SettingsConfigDict(env_prefix="DESK_", frozen=True)

    # The PostgreSQL schema of the desk's tables. Namespaces that share a database need different ones.
    database_schema: str = Field(default="deal_desk", pattern=r"^[a-z][a-z0-9_]{0,62}$")

    filings_every: str = "60s"
    halts_every: float = Field(default=10, gt=0)
    sources_every: str = "2m"

    # EDGAR allows ten requests in any second. The reserve covers delays in the network.
    edgar_rate: str = "5/s"
    news_rate: str = "2/s"
    research_rate: str = "4/s"
    chat_rate: str = "7/s"

    # Seconds to wait for an answer of the chat.
    chat_patience: float = Field(default=2, gt=0)
    max_retry_delay: str = "15s"


class World(BaseSettings):
    """The settings of the simulated upstreams."""

    model_config = SettingsConfigDict(env_prefix="DESK_WORLD_", frozen=True)

    # Their address, if they run as a separate process. Unset: an instance of the desk hosts them, on loopback.
    url: str | None = None
    port: int = Field(default=8090, ge=1, le=65535)
    file: Path = Path(".flotilla/deal_desk.sqlite3")

    # Every `every` seconds, `bunch` filings appear at once.
    every: float = Field(default=20, gt=0)
    bunch: int = Field(default=5, ge=1, le=50)
    # The shares of messages that the chat refuses, and that it does not answer.
    refuses: float = Field(default=0.3, ge=0, le=1)
    falls_silent: float = Field(default=0.1, ge=0, le=1)

    @property
    def address(self) -> str:
        return self.url or f"http://127.0.0.1:{self.port}"


desk = Desk()
world = World()
