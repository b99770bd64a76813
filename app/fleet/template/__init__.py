"""The template and a service that was made from it: `flotilla update` and `flotilla rename`.

    record.py   .flotilla-template: the release that the service has, where the template is, the service's name
    releases.py which releases the template has, and which of them a clone was made from
    trees.py    git trees as dictionaries
    merge.py    the release, merged with the changes of the service
    branch.py   the branch with the result
    names.py    the places that contain the service's name

Nothing here is used by a running instance.
"""
