"""The declaration of a resource: an async generator function that yields one value.

    @resource
    async def http_client(settings: Settings) -> AsyncIterator[httpx.AsyncClient]:
        async with httpx.AsyncClient(timeout=settings.upstream_timeout) as client:
            yield client

The annotation of what it returns gives the type under which code finds the value. A parameter without a default is
filled in by its type: the settings, or a resource that is declared before. To have two resources of one type, give one
of them a type of its own: `Archive = NewType("Archive", httpx.AsyncClient)`.

`@resource` adds to no list: `declared_in` collects what a module has (`app/startup.py`), in the order of its lines.
"""

import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any, Generic, TypeVar, get_args, get_origin, get_type_hints

from app.fleet.errors import ResourceInvalid

Value = TypeVar("Value")


@dataclass(frozen=True)
class Resource(Generic[Value]):
    """A named resource: the result of `@resource`."""

    name: str
    function: Callable[..., AsyncIterator[Value]]
    # The type of its value.
    kind: Any
    # The types of what it needs, by parameter.
    needs: Mapping[str, Any]

    @property
    def location(self) -> str:
        return f"{self.function.__module__}.{self.name}"


def resource(function: Callable[..., AsyncIterator[Value]]) -> Resource[Value]:
    """Declare a resource: opened before the first request and the first run, closed after the last ones."""
    where = f"the resource {function.__module__}.{function.__qualname__} is declared wrongly"
    if not inspect.isasyncgenfunction(function):
        raise ResourceInvalid(f"{where}: it must be `async def` and have one `yield`, without any other decorator")
    try:
        hints = get_type_hints(function)
    except NameError as error:
        raise ResourceInvalid(f"{where}: {error}; its annotations must exist when the module is imported") from None
    returned = hints.get("return")
    if get_origin(returned) not in {AsyncIterator, AsyncGenerator}:
        raise ResourceInvalid(f"{where}: annotate what it yields: `-> AsyncIterator[THE_TYPE]`")
    needs = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if parameter.default is parameter.empty:
            if name not in hints:
                raise ResourceInvalid(f"{where}: the parameter {name!r} needs an annotation, which is what it is")
            needs[name] = hints[name]
    return Resource(function.__name__, function, get_args(returned)[0], needs)


def declared_in(module: ModuleType) -> list[Resource[Any]]:
    """Return the resources of a module, in the order in which they are declared or imported there."""
    return list({id(each): each for each in vars(module).values() if isinstance(each, Resource)}.values())


def check(declared: Sequence[Resource[Any]], settings: type) -> None:
    """Refuse two resources of one type, and a resource that needs what does not exist when it is opened."""
    kinds: dict[Any, str] = {settings: "the settings"}
    for each in declared:
        for name, kind in each.needs.items():
            if not matching(kind, kinds):
                raise ResourceInvalid(
                    f"the resource {each.location} needs {name_of(kind)} (its parameter {name!r}), and no resource "
                    f"before it is of this type: {listed(kinds)}"
                )
        if each.kind in kinds:
            raise ResourceInvalid(
                f"two resources are of the type {name_of(each.kind)}: {kinds[each.kind]} and {each.location}. Give "
                f'one of them a type of its own, such as `NewType("Archive", {name_of(each.kind)})`'
            )
        kinds[each.kind] = each.location


def matching(kind: Any, kinds: Mapping[Any, object]) -> list[Any]:
    """Return which of these types a value of the wanted type may have: this type itself, or its subclasses."""
    if kind in kinds:
        return [kind]
    return [each for each in kinds if isinstance(each, type) and isinstance(kind, type) and issubclass(each, kind)]


def name_of(kind: Any) -> str:
    return str(getattr(kind, "__name__", kind))


def listed(kinds: Mapping[Any, object]) -> str:
    return "there is " + ", ".join(name_of(each) for each in kinds)
