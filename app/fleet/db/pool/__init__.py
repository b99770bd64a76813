"""The pool of connections: borrowing and returning, outages, dedicated connections, SQLAlchemy, statements."""
