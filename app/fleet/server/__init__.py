"""uvicorn, and everything that depends on its internals: no other package uses them.

process.py      the uvicorn server that runs this process
signals.py      the handler that receives a signal before uvicorn does
connections.py  the limits for all client connections of the process
protocol.py     the limits for one client connection
forwarded.py    the proxies whose headers name the client
port_owner.py   which process listens on a port

uvicorn installs its signal handler before it runs the lifespan, so during start-up the handler's `__self__` is the
server. It reads the class of its HTTP protocol from its configuration when it accepts a connection, and it opens its
listener after start-up, so a class that start-up puts there serves every connection. This is the same under plain
`uvicorn app.main:app`, in each process of `--workers N`, and under `flotilla serve`.

Not limited: any other server, and uvicorn with `--http h11` (its parser has its own limit for headers) or another
protocol. The log then has `server.not_limited`. Connections that were upgraded to WebSockets count towards the limit of
connections and have uvicorn's own limits.
"""
