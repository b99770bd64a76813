"""YOUR CODE: what your routes and actions share, and who may call them. docs/guides/your-own.md shows both.

A resource is opened before the first request and the first run, and closed after the last ones:

    @resource
    async def http_client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(timeout=10) as client:
            yield client

A route declares a parameter `client: Provided[httpx.AsyncClient]`; any other code calls `provided(httpx.AsyncClient)`.
`provided(Settings)` returns the settings.

API keys say who may call the service (`FLOTILLA_API_KEYS`), unless there is a function `sign_in` here.
"""
