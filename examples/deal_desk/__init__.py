"""The deal desk: an example service that uses every mechanism of `app.fleet`.

    FLOTILLA_ACTIONS=examples.deal_desk make up

    filings.py    a feed that is polled every minute; no filing is missed or processed twice
    halts.py      a feed that one instance polls every ten seconds
    sources.py    an orchestrator: several news sources, read in parallel, one slow and one unreliable
    research.py   a worker whose calls cost money; each deal is paid once
    alerts.py     alerts, delivered to a chat that refuses some and does not answer others
    tables.py     the tables of the desk
    settings.py   intervals, rates and addresses
    upstreams.py  how the upstreams are called
    world/        the simulated upstreams, on loopback; they fail as real ones do, and record all requests
    verdict.py    what this record proves about the desk

README.md beside this file describes the whole.
"""
