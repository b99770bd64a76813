"""Resources: what a service opens once for each instance, such as the client of an upstream, and finds by its type.

resource.py     `@resource` declares one, and the declarations are checked
resources.py    opens, closes and finds the resources of one instance; `provided` and `Provided`
"""
