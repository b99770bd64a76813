"""An example, to read and to delete: one transaction stores a mailing and the run that sends it."""

from datetime import datetime
from typing import Annotated

from fastapi import APIRouter, HTTPException, Path, Response
from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from app.actions.mailings import Letters, send_mailing
from app.fleet import InSession
from app.models import Mailing

router = APIRouter(prefix="/mailings", tags=["mailings"])

Subject = Annotated[str, StringConstraints(strip_whitespace=True, min_length=1, max_length=200, pattern=r"^[^\x00]+$")]
Address = Annotated[str, StringConstraints(max_length=254, pattern=r"^[^@\s\x00]+@[^@\s\x00]+$")]


class NewMailing(BaseModel):
    subject: Subject
    recipients: list[Address] = Field(min_length=1, max_length=1000)


class ShownMailing(BaseModel):
    model_config = ConfigDict(from_attributes=True)

    id: int
    subject: str
    recipients: list[str]
    created_at: datetime
    delivered: int | None
    sent_at: datetime | None


@router.post("", status_code=201)
async def create_mailing(new: NewMailing, session: InSession, response: Response) -> ShownMailing:
    """Store a mailing and trigger the run that sends it: both or neither."""
    mailing = Mailing(subject=new.subject, recipients=new.recipients)
    session.add(mailing)
    await session.flush()
    letters = Letters(mailing=mailing.id, subject=new.subject, recipients=new.recipients)
    await send_mailing.trigger(letters, session=session)
    response.headers["Location"] = f"/mailings/{mailing.id}"
    return ShownMailing.model_validate(mailing)


@router.get("/{mailing_id}")
async def get_mailing(mailing_id: Annotated[int, Path(lt=2**63)], session: InSession) -> ShownMailing:
    """Show a mailing, and whether it has been sent."""
    mailing = await session.get(Mailing, mailing_id)
    if mailing is None:
        raise HTTPException(404, f"there is no mailing {mailing_id}")
    return ShownMailing.model_validate(mailing)
