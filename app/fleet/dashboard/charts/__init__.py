"""The charts of the last hour and day, and the sparklines of the actions: what happened to runs, from `run_minutes`.

minutes.py     reading the table, shared by all viewers
drawing.py     from numbers to the shapes of an SVG, and to axes that a person reads
page.py        the page
"""
