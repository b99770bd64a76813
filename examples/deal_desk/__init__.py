"""The desk: a service that watches for deals, and for which every tool of the kit was made.

    FLOTILLA_ACTIONS=examples.deal_desk make up

    filings.py    a feed that is looked at every minute; nothing on it is missed, or told twice
    halts.py      a feed that one instance looks at, every ten seconds
    sources.py    an orchestrator: several news sources, read side by side, one of them slow and one unreliable
    research.py   a worker that costs money for each call, and pays once
    alerts.py     alerts, delivered to a chat whose webhook fails and falls silent
    tables.py     what the desk remembers
    settings.py   how often, how much, and where
    upstreams.py  how the others are called
    world/        the others, made up: on loopback; they fail as others do, and note all that reaches them
    verdict.py    what that record says of the desk

README.md beside this file has the whole of it.
"""
