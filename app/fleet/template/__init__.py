"""The template and a service that was made from it: `flotilla update` and `flotilla rename`.

    commands.py  the two commands
    record.py    .flotilla-template: the release that the repository has, the template's address, the service's name
    releases.py  which releases the template has, and which of its commits a clone was made from
    merge.py     the release, merged with the changes of the clone
    branch.py    the branch with the result
    notes.py     the changelog between the two releases
    names.py     the places that contain the service's name
    trees.py     git trees as dictionaries
    git.py       git as a process

A running instance uses nothing of it.
"""
