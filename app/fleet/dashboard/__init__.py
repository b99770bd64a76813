"""The operator's pages at `/dashboard`: the fleet, the actions, the runs, one run, the coordination, charts.

    fleet.py, actions.py, runs.py, run.py, errors.py, coordination.py    the pages
    bulk.py            retry or cancel all runs that match a filter
    payload_form.py    the form of a payload, made from its type
    timeline.py        the timeline of a run
    charts/            what happened in the last hour and day, and the sparklines of the actions
    frame/             what every page has: sign-in, forms, templates, wording, reads that all viewers share

Any instance of role `web` or `all` serves it. The pages are HTML from templates, and work without the script
(`static/dashboard.js`), which only brings a page up to date. Nothing is loaded from elsewhere.

A service that does not want it leaves out the line in `app/main.py` that includes `router`. A sign-in of the service
itself (`sign_in` in `app/startup.py`) decides who sees it.
"""

from fastapi import APIRouter

from app.fleet.dashboard import actions, bulk, coordination, errors, fleet, run, runs
from app.fleet.dashboard.charts import page as charts
from app.fleet.dashboard.frame import page, session

__all__ = ["router"]

router = APIRouter()
for each in (page, session, fleet, actions, runs, run, errors, bulk, coordination, charts):
    router.include_router(each.router)
