"""What appears in the world: at intervals a bunch of filings, some new deals, a halt, and headlines.

Several filings and sources name the same deal, so a client that wants to pay once per deal must check.
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
# One filing in so many is about a new deal.
FILINGS_A_DEAL = 4
# Deals that filings and headlines are about at a time.
CURRENT_DEALS = 8


class Publisher:
    """Invents filings, halts and headlines, and stores them in the record."""

    def __init__(self, record: Record, bunch: int) -> None:
        self._record = record
        self._bunch = bunch
        # Unique per world: a desk that continues with a new world must not take its filings for seen.
        self._agent = f"{secrets.randbelow(10**10):010}"
        self._chance = random.Random()

    def publish(self) -> None:
        known = self._record.known_deals()
        new = [self._deal(len(known) + number) for number in range(1, 1 + max(1, self._bunch // FILINGS_A_DEAL))]
        deals = (new + known)[:CURRENT_DEALS]
        self._record.add([*self._filings(new, deals), self._halt(), *self._headlines(deals)])

    def _filings(self, new: Sequence[str], deals: Sequence[str]) -> Iterator[Filing]:
        """Yield new filings; each new deal has at least one."""
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
