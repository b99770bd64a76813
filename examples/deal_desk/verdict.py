"""What the world's record says of the desk. Nothing of this is asked of the desk itself.

    filing missed     it appeared, and no alert about it is in the chat
    alert lost        something appeared (a filing, a halt, a deal), and the chat has nothing about it
    twice             the chat has shown an alert again. Excused, if the chat had not answered the time before; or if
                      its caller was killed right then, between the answer and the commit, which only who kills knows
    too often         an upstream has refused a request because there were too many within a second
    paid twice        a deal was charged for more than once
    no singleton      one caller looks at the halts, then another, and then the first again

While things are on their way, alerts are missing that are none the less not lost: let the world be quiet first.
"""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

from examples.deal_desk.world.record import ALLOWED, Everything, Post

# What an alert is told by: its kind and its subject.
Told = tuple[str, str]
# How long after an answer its caller may still have been on the way to its commit, on a machine with much to do.
ON_THE_WAY = 1.0


@dataclass(frozen=True)
class Verdict:
    filings: int
    halts: int
    deals: int
    # What should be in the chat and is not; of these, the filings are those that were missed.
    missing: list[Told]
    posts: Counter[str]
    shown_again: list[tuple[Post, Post]]
    not_excused: list[tuple[Post, Post]]
    # The most requests within any second, and how many were refused.
    busiest: dict[str, int]
    too_often: Counter[str]
    calls: int
    charges: int
    # Who looked at the halts, one turn after the other.
    turns: list[str]
    paid_twice: list[str]
    not_paid: list[str]

    @property
    def missed(self) -> list[str]:
        return [subject for kind, subject in self.missing if kind == "filing"]


def judge(record: Everything, killed: Mapping[str, float] | None = None) -> Verdict:
    """Judge a record. `killed` says when, of each caller that was."""
    deals = {filing.deal for filing in record.filings} | {headline.deal for headline in record.headlines}
    charges = Counter(charge.deal for charge in record.charges)
    again = shown_again(record.posts)
    return Verdict(
        filings=len(record.filings),
        halts=len(record.halts),
        deals=len(deals),
        missing=sorted(expected(record, deals) - {told(post) for post in record.posts if post.fate == "shown"}),
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


def expected(record: Everything, deals: set[str]) -> set[Told]:
    """Every alert that should be in the chat."""
    filings = {("filing", filing.accession) for filing in record.filings}
    halts = {("halt", halt.halt) for halt in record.halts}
    return filings | halts | {("deal", deal) for deal in deals}


def told(post: Post) -> Told:
    return post.kind, post.subject


def shown_again(posts: Sequence[Post]) -> list[tuple[Post, Post]]:
    """Each time that an alert was shown once more, with the time before."""
    by_alert: dict[Told, list[Post]] = {}
    for post in posts:
        if post.fate == "shown":
            by_alert.setdefault(told(post), []).append(post)
    return [pair for shown in by_alert.values() for pair in pairwise(shown)]


def excused(before: Post, killed: Mapping[str, float]) -> bool:
    if before.answered_at is None:
        return True
    died_at = killed.get(before.caller)
    return died_at is not None and died_at < before.answered_at + ON_THE_WAY


def busiest_second(record: Everything, upstream: str) -> int:
    times = [request.at for request in record.requests if request.upstream == upstream]
    most = first = 0
    for last, time in enumerate(times):
        while times[first] <= time - 1:
            first += 1
        most = max(most, last - first + 1)
    return most
