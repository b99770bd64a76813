"""YOUR CODE: the HTTP routes of your service. Add your routers to the one below.

If API keys are set, each route needs a key with the scope `read` for GET and HEAD, and `operate` for other methods.
"""

from fastapi import APIRouter

from app.routes import mailings

router = APIRouter()
router.include_router(mailings.router)
