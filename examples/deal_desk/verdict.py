"""What the record of the upstreams proves about the desk. The desk itself is not asked.

    filing missed     it appeared, and the chat has no alert about it
    alert lost        a filing, a halt or a deal appeared, and the chat has no alert about it
    twice             the chat has shown an alert again. Excused if the chat had not answered before, or if its caller
                      was killed between the answer and the commit, which only the killer knows
    too often         an upstream has refused a request, because there were too many within a second
    paid twice        a deal was charged more than once
    no singleton      one caller polls the halts, then another one, and then the first one again

While work is in progress, some alerts are missing that are not lost: let the world be quiet first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from examples.deal_desk.world.record import ALLOWED, Everything, Post

# Kind and subject identify an alert.
AlertKey = tuple[str, str]
# Seconds from an answer to the commit of its caller, at most, on a busy machine.
MAX_COMMIT_DELAY = 1.0


@dataclass(frozen=True)
class Verdict:
    filings: int
    halts: int
    deals: int
    # Alerts that the chat should have and has not. Its filings are the missed filings.
    missing: list[AlertKey]
    posts: Counter[str]
    shown_again: list[tuple[Post, Post]]
    not_excused: list[tuple[Post, Post]]
    # The most requests within any second, and the number of refused requests.
    busiest: dict[str, int]
    too_often: Counter[str]
    calls: int
    charges: int
    # The callers that polled the halts, one turn after the other.
    turns: list[str]
    paid_twice: list[str]
    not_paid: list[str]

    @property
    def missed(self) -> list[str]:
        return [subject for kind, subject in self.missing if kind == "filing"]


def judge(record: Everything, killed: Mapping[str, float] | None = None) -> Verdict:
    """Judge a record. `killed` has the time at which each killed caller was killed."""
    deals = {filing.deal for filing in record.filings} | {headline.deal for headline in record.headlines}
    charges = Counter(charge.deal for charge in record.charges)
    again = shown_again(record.posts)
    return Verdict(
        filings=len(record.filings),
        halts=len(record.halts),
        deals=len(deals),
        missing=sorted(expected(record, deals) - {key_of(post) for post in record.posts if post.fate == "shown"}),
        posts=Counter(post.fate for post in record.posts),
        shown_again=again,
        not_excused=[pair for pair in again if not excused(pair[0], killed or {})],
        busiest={upstream: busiest_second(record, upstream) for upstream in ALLOWED},
        too_often=Counter(request.upstream for request in record.requests if request.refused),
        calls=sum(request.upstream == "research" for request in record.requests),
        charges=charges.total(),
        turns=[caller for caller, _ in groupby(each.caller for each in record.requests if each.upstream == "halts")],
        paid_twice=[deal for deal, times in charges.items() if times > 1],
        not_paid=sorted(deals - charges.keys()),
    )


def expected(record: Everything, deals: set[str]) -> set[AlertKey]:
    """Return all alerts that should be in the chat."""
    filings = {("filing", filing.accession) for filing in record.filings}
    halts = {("halt", halt.halt) for halt in record.halts}
    return filings | halts | {("deal", deal) for deal in deals}


def key_of(post: Post) -> AlertKey:
    return post.kind, post.subject


def shown_again(posts: Sequence[Post]) -> list[tuple[Post, Post]]:
    """Return each repeated post of an alert, with the post before it."""
    by_alert: dict[AlertKey, list[Post]] = {}
    for post in posts:
        if post.fate == "shown":
            by_alert.setdefault(key_of(post), []).append(post)
    return [pair for shown in by_alert.values() for pair in pairwise(shown)]


def excused(before: Post, killed: Mapping[str, float]) -> bool:
    if before.answered_at is None:
        return True
    died_at = killed.get(before.caller)
    return died_at is not None and died_at < before.answered_at + MAX_COMMIT_DELAY


def busiest_second(record: Everything, upstream: str) -> int:
    times = [request.at for request in record.requests if request.upstream == upstream]
    most = first = 0
    for last, time in enumerate(times):
        while times[first] <= time - 1:
            first += 1
        most = max(most, last - first + 1)
    return most
