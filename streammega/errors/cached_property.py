"""`cached_property` without a lock, on every Python."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from functools import cached_property as cached_property
else:

    class cached_property:
        """A property that is computed once for each object. Source: functools.cached_property.

        On Python 3.11 functools' has one lock for all objects of a class, held while a value is
        computed. Two threads whose properties need each other then wait for ever, and so does a child
        that is forked meanwhile. Here two threads may both compute a value, and all get the first one
        that is stored.
        """

        def __init__(self, function: Any) -> None:
            self.func = function
            self.__doc__ = function.__doc__

        def __set_name__(self, owner: type, name: str) -> None:
            self.name = name

        def __get__(self, instance: Any, owner: type | None = None) -> Any:
            # Once it is stored, Python takes the value from __dict__ and does not come here.
            if instance is None:
                return self
            return instance.__dict__.setdefault(self.name, self.func(instance))
