"""The HTTP interface of the upstreams. Each upstream refuses excess requests with 429.

GET  /edgar/latest, /edgar/filings/{accession}    the newest filings; a document, which names its deal
GET  /halts                                       the newest halts
GET  /news/{source}                               wire: fast. gazette: slow. rumours: fails two times in five
POST /research                                    charges once per Idempotency-Key, and for each call without
                                                  one; one time in five, its gateway times out after the charge
POST /chat                                        refuses some, and never answers some, half of which it shows
GET  /record                                      all requests
POST /quiet                                       nothing new appears from now on
"""

import asyncio
import contextlib
import random
import uuid
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Header, HTTPException, Request, Response
from pydantic import BaseModel

from examples.deal_desk.settings import World
from examples.deal_desk.world.record import ALLOWED, Everything, Fate, Record

# Longer than all timeouts of callers.
SILENCE = 30.0

Caller = Annotated[str, Header(alias="User-Agent")]


class Message(BaseModel):
    kind: str
    subject: str
    message: str


class Order(BaseModel):
    deal: str


class Upstreams:
    """The behaviour of all upstreams."""

    def __init__(self, record: Record, settings: World) -> None:
        self.record = record
        self.quiet = False
        self._settings = settings
        self._chance = random.Random()

    def admit(self, upstream: str, caller: str) -> None:
        if not self.record.admit(upstream, caller):
            raise HTTPException(429, f"{upstream} allows {ALLOWED[upstream]} requests a second")

    async def latest_filings(self, caller: Caller) -> list[dict[str, str]]:
        self.admit("edgar", caller)
        return [{name: filing[name] for name in ("accession", "company", "form")} for filing in self.newest("filings")]

    async def document(self, accession: str, caller: Caller) -> dict[str, Any]:
        self.admit("edgar", caller)
        if (filing := self.record.filing(accession)) is None:
            raise HTTPException(404, f"there is no filing {accession}")
        return filing

    async def halts(self, caller: Caller) -> list[dict[str, Any]]:
        self.admit("halts", caller)
        return self.newest("halts")

    async def news(self, source: Literal["wire", "gazette", "rumours"], caller: Caller) -> list[dict[str, Any]]:
        self.admit(source, caller)
        if source == "gazette":
            await asyncio.sleep(self._chance.uniform(0.5, 1.5))
        if source == "rumours" and self._happens(0.4):
            raise HTTPException(503, "the source is overloaded")
        return self.record.headlines(source)

    async def research(
        self, order: Order, caller: Caller, idempotency_key: Annotated[str | None, Header()] = None
    ) -> dict[str, Any]:
        self.admit("research", caller)
        key = idempotency_key or str(uuid.uuid4())
        self.record.charge(key, order.deal)
        await asyncio.sleep(self._chance.uniform(0.3, 1))
        if self._happens(0.2):
            raise HTTPException(504, "the gateway timed out; it is unknown whether you were charged")
        return {"charge": key, "report": {"deal": order.deal, "rating": f"{sum(order.deal.encode()) % 5 + 1} of 5"}}

    async def chat(self, message: Message, request: Request, caller: Caller) -> Response:
        self.admit("chat", caller)
        silent = self._happens(self._settings.falls_silent)
        refused = not silent and self._happens(self._settings.refuses)
        fate: Fate = "refused" if refused else "lost" if silent and self._happens(0.5) else "shown"
        post = self.record.post(message.kind, message.subject, caller, fate)
        if refused:
            raise HTTPException(500, "something went wrong")
        if silent:
            await fall_silent(request)
        else:
            # Lets the event loop notice that the caller has disconnected.
            await asyncio.sleep(0.01)
            if not await request.is_disconnected():
                self.record.answered(post)
        return Response(status_code=204)

    async def everything(self) -> Everything:
        return self.record.everything()

    async def be_quiet(self) -> None:
        self.quiet = True

    def newest(self, feed: str) -> list[dict[str, Any]]:
        return self.record.newest(feed)

    def _happens(self, share: float) -> bool:
        return self._chance.random() < share


async def fall_silent(request: Request) -> None:
    """Do not answer until the caller has disconnected."""
    with contextlib.suppress(TimeoutError):
        # The body has been read, so the next message is the disconnect.
        await asyncio.wait_for(request.receive(), SILENCE)


def create_world(upstreams: Upstreams) -> FastAPI:
    app = FastAPI(title="Fake upstreams of the deal desk")
    app.get("/edgar/latest")(upstreams.latest_filings)
    app.get("/edgar/filings/{accession}")(upstreams.document)
    app.get("/halts")(upstreams.halts)
    app.get("/news/{source}")(upstreams.news)
    app.post("/research")(upstreams.research)
    app.post("/chat")(upstreams.chat)
    app.get("/record")(upstreams.everything)
    app.post("/quiet", status_code=204)(upstreams.be_quiet)
    return app
