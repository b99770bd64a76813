"""The operator's pages at `/dashboard`: the fleet, the actions, the runs, one run, the locks.

    session.py     the viewer: sign-in with an API key, and the cookie of the session
    forms.py       the fields of a form, and its token
    page.py        a page: its template, its headers, and what it shows instead if something goes wrong
    snapshot.py    the state of the cluster, read at most once a second for all viewers
    wording.py     how times, durations and schedules are written
    fleet.py, actions.py, runs.py, locks.py    the pages

Any instance of role `web` or `all` serves it. The pages are HTML from templates, and work without the script
(`static/dashboard.js`), which only brings a page up to date. Nothing is loaded from elsewhere.

A service that does not want it leaves out the line in `app/main.py` that includes `router`. One that has a sign-in of
its own replaces the dependency: `app.dependency_overrides[dashboard.viewer] = my_dependency`, which returns a `Viewer`.
"""

from fastapi import APIRouter

from app.fleet.dashboard import actions, fleet, locks, page, runs, session
from app.fleet.dashboard.session import Viewer, viewer

__all__ = ["Viewer", "router", "viewer"]

router = APIRouter()
for each in (page, session, fleet, actions, runs, locks):
    router.include_router(each.router)
