"""YOUR CODE: the HTTP routes of your service. Add your routers to one of the two below.

If API keys are set, a route of `router` needs a key with the scope `read` for GET and HEAD, and `operate` for other
methods. A route of `public` needs none: pages, and webhooks that check the signature of their sender.
"""

from fastapi import APIRouter

from app.routes import mailings

router = APIRouter()
router.include_router(mailings.router)

public = APIRouter()
