"""The catalogue: the actions and singletons in the code of this instance.

`@action` adds to no list. `Catalogue.load` imports the modules of `FLOTILLA_ACTIONS`, packages with all their modules,
and collects the actions that it finds in them. Two actions with the same name are refused, because either could be the
one that runs.

The database assigns an id to each action (`synchronise.py`). Until then, an action cannot be triggered.
"""

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Self, TypeVar

from app.fleet.coordination.singletons import Singleton
from app.fleet.engine.actions.action import Action
from app.fleet.errors import ActionInvalid, ActionUnknown, SettingsError

Declared = TypeVar("Declared", Action[Any], Singleton)


class Catalogue:
    """Actions by name and, after `set_ids`, by id."""

    def __init__(self, actions: Mapping[str, Action[Any]], singletons: Mapping[str, Singleton] | None = None) -> None:
        self._by_name = dict(actions)
        self.singletons = list((singletons or {}).values())
        self._by_id: dict[int, Action[Any]] = {}
        self._ids: dict[str, int] = {}

    @classmethod
    def load(cls, modules: Sequence[str]) -> Self:
        """Import these modules, and collect the actions and singletons in them."""
        actions: dict[str, Action[Any]] = {}
        singletons: dict[str, Singleton] = {}
        for module in (each for name in modules for each in imported(name)):
            for value in vars(module).values():
                if isinstance(value, Action):
                    add(actions, value, "two actions are called")
                elif isinstance(value, Singleton):
                    add(singletons, value, "two singletons are called")
        return cls(actions, singletons)

    def __iter__(self) -> Iterator[Action[Any]]:
        return iter(self._by_name.values())

    def __len__(self) -> int:
        return len(self._by_name)

    def __contains__(self, name: str) -> bool:
        return name in self._by_name

    def __getitem__(self, name: str) -> Action[Any]:
        try:
            return self._by_name[name]
        except KeyError:
            raise ActionUnknown(f"there is no action {name!r}: `flotilla actions` or GET /actions lists them") from None

    def set_ids(self, ids: Mapping[str, int]) -> None:
        """Set the ids that the database has assigned."""
        self._ids = dict(ids)
        self._by_id = {ids[name]: each for name, each in self._by_name.items() if name in ids}

    @property
    def ids(self) -> list[int]:
        return list(self._by_id)

    def id_of(self, name: str) -> int:
        action = self[name]
        try:
            return self._ids[action.name]
        except KeyError:
            raise ActionUnknown(
                f"the action {name!r} is in the code, but not yet in the database: the first instance that starts with "
                f"it adds it (`flotilla up`)"
            ) from None

    def of_id(self, identifier: int) -> Action[Any] | None:
        return self._by_id.get(identifier)


def add(found: dict[str, Declared], value: Declared, two_are_called: str) -> None:
    other = found.setdefault(value.name, value)
    if other is not value:
        raise ActionInvalid(f"{two_are_called} {value.name!r}: {other.location} and {value.location}; rename one")


def imported(name: str) -> Iterator[ModuleType]:
    """Import a module, and all modules below it."""
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            raise SettingsError(f"FLOTILLA_ACTIONS names {name!r}, and there is no such module") from error
        raise
    yield module
    if hasattr(module, "__path__"):
        for each in sorted(pkgutil.walk_packages(module.__path__, f"{name}."), key=lambda found: found.name):
            yield importlib.import_module(each.name)
