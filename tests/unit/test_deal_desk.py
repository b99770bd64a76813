"""The judge of `examples/deal_desk` detects each violation that it is meant to detect."""

from collections.abc import Sequence

import pytest

from examples.deal_desk.verdict import Verdict, judge
from examples.deal_desk.world.record import Charge, Everything, Fate, Filing, Halt, Headline, Post, Request

pytestmark = pytest.mark.template

DEAL = "Baltic Freight / Keel Tugs #1"
FILING = Filing(accession="7-26-1", company="Baltic Freight", form="8-K", deal=DEAL, at=1)
HALT = Halt(halt="7-H1", company="Baltic Freight", at=1)
CHARGE = Charge(key=DEAL, deal=DEAL, at=3)
ALERTS = [("filing", "7-26-1"), ("halt", "7-H1"), ("deal", DEAL)]


def post(kind: str, subject: str, *, at: float = 5, fate: Fate = "shown", answered: bool = True) -> Post:
    answered_at = at if answered else None
    return Post(post=0, kind=kind, subject=subject, caller="desk/1", fate=fate, at=at, answered_at=answered_at)


def verdict(
    posts: Sequence[Post] | None = None,
    *,
    charges: Sequence[Charge] = (CHARGE,),
    headlines: Sequence[Headline] = (),
    requests: Sequence[Request] = (),
    killed: dict[str, float] | None = None,
) -> Verdict:
    """Judge a small record, which has no violations except those given."""
    record = Everything(
        filings=[FILING],
        halts=[HALT],
        headlines=list(headlines),
        requests=list(requests),
        charges=list(charges),
        posts=[post(*alert) for alert in ALERTS] if posts is None else list(posts),
    )
    return judge(record, killed)


def test_a_record_without_violations_has_no_findings() -> None:
    found = verdict()
    assert (found.missing, found.missed, found.shown_again, found.not_excused) == ([], [], [], [])
    assert (found.paid_twice, found.not_paid, found.too_often.total()) == ([], [], 0)
    assert (found.filings, found.halts, found.deals, found.charges) == (1, 1, 1, 1)


@pytest.mark.parametrize("fate", ["refused", "lost", None])
@pytest.mark.parametrize("alert", ALERTS)
def test_an_alert_that_the_chat_has_not_shown_is_missing(alert: tuple[str, str], fate: Fate | None) -> None:
    tried = [] if fate is None else [post(*alert, fate=fate)]
    found = verdict([*tried, *(post(*other) for other in ALERTS if other != alert)])
    assert found.missing == [alert]
    assert found.missed == (["7-26-1"] if alert[0] == "filing" else [])


def test_a_deal_that_only_a_headline_names_needs_a_payment_and_an_alert() -> None:
    found = verdict(headlines=[Headline(source="wire", number=1, headline="Talks", deal="another", at=2)])
    assert (found.missing, found.not_paid) == ([("deal", "another")], ["another"])


def test_an_alert_that_is_shown_again_after_an_answer_is_not_excused() -> None:
    again = [post(*ALERTS[0]), post(*ALERTS[0], at=9)]
    assert verdict(again).not_excused == [(again[0], again[1])]


def test_an_alert_without_an_answer_may_be_shown_again_only_until_it_is_answered() -> None:
    three = [post(*ALERTS[0], answered=False), post(*ALERTS[0], at=6), post(*ALERTS[0], at=7)]
    found = verdict(three)
    assert len(found.shown_again) == 2
    assert found.not_excused == [(three[1], three[2])]


def test_an_alert_that_was_refused_first_does_not_count_as_shown_again() -> None:
    assert verdict([post(*ALERTS[0], fate="refused"), post(*ALERTS[0], at=6)]).shown_again == []


@pytest.mark.parametrize(("killed_at", "excused"), [(4.9, True), (5.5, True), (6.5, False), (None, False)])
def test_a_repeated_alert_is_excused_if_its_caller_was_killed_soon_after_the_answer(
    killed_at: float | None, excused: bool
) -> None:
    killed = {} if killed_at is None else {"desk/1": killed_at, "desk/2": 5}
    found = verdict([post(*ALERTS[0]), post(*ALERTS[0], at=9)], killed=killed)
    assert (found.not_excused == []) is excused


def test_a_deal_that_was_charged_under_two_keys_was_paid_twice() -> None:
    found = verdict(charges=[CHARGE, Charge(key="another", deal=DEAL, at=4)])
    assert (found.paid_twice, found.not_paid, found.charges) == ([DEAL], [], 2)


def test_refused_requests_are_counted_and_the_busiest_second_starts_at_any_time() -> None:
    times = [0.0, 0.9, 1.8, 1.9, 2.0, 3.0]
    requests = [Request(upstream="edgar", caller="desk/1", refused=at == 2.0, at=at) for at in times]
    found = verdict(requests=requests)
    assert found.too_often == {"edgar": 1}
    assert found.busiest["edgar"] == 3


def test_a_new_turn_begins_when_the_caller_changes() -> None:
    callers = ["desk/1", "desk/1", "desk/2", "desk/1"]
    requests = [Request(upstream="halts", caller=each, refused=False, at=0) for each in callers]
    assert verdict(requests=requests).turns == ["desk/1", "desk/2", "desk/1"]
