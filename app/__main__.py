"""`python -m app` is `flotilla`."""

from app.fleet.cli import main

main()
