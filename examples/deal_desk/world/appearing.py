"""What appears in the world: every so many seconds a bunch of filings, some new deals, a halt, and headlines.

A deal is named several times, in filings and by sources, as deals are: whoever wants to pay once for each has to look.
"""

import random
import secrets
import time
from collections.abc import Iterator, Sequence

from examples.deal_desk.world.record import Filing, Halt, Headline, Record

FORMS = ("8-K", "SC 13D", "DEFM14A", "S-4", "425")
NAMES = ("Baltic", "Meridian", "Northwind", "Halyard", "Keel", "Sextant", "Anchor", "Spinnaker", "Windlass", "Beacon")
TRADES = ("Freight", "Shipping", "Insurance", "Dredging", "Cables", "Ports", "Tugs", "Salvage")
SOURCES = ("wire", "gazette", "rumours")
# Of so many filings, one is about a deal that nobody has heard of.
FILINGS_A_DEAL = 4
# How many deals are talked about at a time.
TALKED_ABOUT = 8


class Publisher:
    """Makes things up, and puts them into the record."""

    def __init__(self, record: Record, bunch: int) -> None:
        self._record = record
        self._bunch = bunch
        # No two worlds have a number in common: a desk that outlives one takes nothing of the next for seen.
        self._agent = f"{secrets.randbelow(10**10):010}"
        self._chance = random.Random()

    def publish(self) -> None:
        known = self._record.known_deals()
        new = [self._deal(len(known) + number) for number in range(1, 1 + max(1, self._bunch // FILINGS_A_DEAL))]
        deals = (new + known)[:TALKED_ABOUT]
        self._record.add([*self._filings(new, deals), self._halt(), *self._headlines(deals)])

    def _filings(self, new: Sequence[str], deals: Sequence[str]) -> Iterator[Filing]:
        """Each new deal has one at least."""
        about = [*new, *self._chance.choices(deals, k=self._bunch)][: self._bunch]
        for number, deal in enumerate(about, self._record.count("filings") + 1):
            accession = f"{self._agent}-26-{number:06}"
            form = self._chance.choice(FORMS)
            yield Filing(accession=accession, company=self._company(), form=form, deal=deal, at=time.time())

    def _halt(self) -> Halt:
        number = self._record.count("halts") + 1
        return Halt(halt=f"{self._agent}-H{number:05}", company=self._company(), at=time.time())

    def _headlines(self, deals: Sequence[str]) -> Iterator[Headline]:
        number = self._record.count("headlines")
        for source in SOURCES:
            for deal in self._chance.sample(deals, k=min(2, len(deals))):
                number += 1
                headline = f"Talks about {deal}"
                yield Headline(source=source, number=number, headline=headline, deal=deal, at=time.time())

    def _deal(self, number: int) -> str:
        return f"{self._company()} / {self._company()} #{number}"

    def _company(self) -> str:
        return f"{self._chance.choice(NAMES)} {self._chance.choice(TRADES)}"
