"""The front: what a browser gets without a key, the page of links at `/` and the files of `app/static`."""
