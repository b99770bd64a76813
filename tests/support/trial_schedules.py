"""Scheduled actions for tests, which make them due themselves."""

from app.fleet import Run, action


@action("seldom", every="10h")
async def seldom(_: Run) -> None: ...
