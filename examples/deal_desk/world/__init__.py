"""The fake upstreams: one world for all instances, which fails as others do and keeps a record of what reached it.

    appearing.py   what appears there: filings, halts, headlines
    record.py      its state, and its record, in a file: neither is lost with the process that has it open
    app.py         its HTTP
    host.py        who runs it

Nothing of the desk is imported here but where the world is to be. What it says of the desk it has from outside.
"""
