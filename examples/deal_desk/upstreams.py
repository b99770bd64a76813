"""How the upstreams are called: one client per call, with a timeout and a name that the upstreams record.

Every answer other than 2xx raises an exception, so that a breaker counts it and the run is retried. Its text, which
becomes the `error` of the run, describes the failure in one line.
"""

import os
import ssl

import httpx

from examples.deal_desk.settings import world

# Created once per process, because reading the certificates takes longer than most calls.
TLS = ssl.create_default_context()
# Identifies the caller in the record of the upstreams.
CALLER = f"deal-desk/{os.getpid()}"


def upstream(patience: float = 10) -> httpx.AsyncClient:
    """Return a client with this timeout in seconds."""
    return httpx.AsyncClient(
        base_url=world.address,
        timeout=patience,
        headers={"User-Agent": CALLER},
        event_hooks={"response": [refuse_failure]},
        verify=TLS,
    )


async def refuse_failure(answer: httpx.Response) -> None:
    if not answer.is_success:
        text = f"{answer.request.method} {answer.request.url.path}: {answer.status_code} {answer.reason_phrase}"
        raise httpx.HTTPStatusError(text, request=answer.request, response=answer)
