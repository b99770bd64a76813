"""Services built on the template, to read and to copy from."""
