"""The simulated upstreams: one world for all instances, which fails as real upstreams do and records all requests.

    appearing.py   what appears: filings, halts, headlines
    record.py      its state and its record, in a file, which outlives the process that has it open
    app.py         its HTTP interface
    host.py        the process that runs it

It imports nothing of the desk except the address of the world, so its record is independent of the desk.
"""
