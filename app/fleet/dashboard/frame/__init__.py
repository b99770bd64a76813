"""What every page of the dashboard has: the viewer's sign-in, forms, templates and headers, and the wording of values.

session.py     the viewer: sign-in with an API key, and the cookie of the session
forms.py       the fields of a form, and its token
page.py        a page: its template, its headers, and what it shows instead if something goes wrong
shared.py      an answer of the database that all viewers share
wording.py     how times, durations and schedules are written
"""
