"""How the others are called: one client for each call, with a deadline, and a name that they can put into their record.

Whatever is no 2xx is an exception, so that a breaker counts it and a run is tried again. Its text, which stands in the
run's `error`, says what it was in one line.
"""

import os
import ssl

import httpx

from examples.deal_desk.settings import world

# Reading the certificates takes longer than most calls: once for each process.
TLS = ssl.create_default_context()
# Who calls. An upstream that is asked "was it you?" has something to go by.
CALLER = f"deal-desk/{os.getpid()}"


def upstream(patience: float = 10) -> httpx.AsyncClient:
    """Make a client that waits so many seconds for an answer."""
    return httpx.AsyncClient(
        base_url=world.address,
        timeout=patience,
        headers={"User-Agent": CALLER},
        event_hooks={"response": [refuse_failure]},
        verify=TLS,
    )


async def refuse_failure(answer: httpx.Response) -> None:
    if not answer.is_success:
        what = f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.reason_phrase}"
        raise httpx.HTTPStatusError(what, request=answer.request, response=answer)
