"""YOUR CODE: the service's own HTTP routes. Add your routers to the one below.

Each route needs an API key with scope `read` for GET and HEAD and `operate` for everything else, once keys are set.
"""

from fastapi import APIRouter

from app.routes import mailings

router = APIRouter()
router.include_router(mailings.router)
