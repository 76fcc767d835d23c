"""Networks that share a body and have a head for each task."""

from collections.abc import Callable
from typing import Any, TypeAlias, final

from torch import nn

from credo.errors import CallOrderError, InvalidType, InvalidValue

NewHead: TypeAlias = Callable[[], nn.Module]


@final
class MultiHead(nn.Module):
    """`body`, then the head in use. A head is added when its task arrives, and with it its parameters.

        model = MultiHead(body, new_head=lambda: nn.Linear(100, 2))
        model.arrive("first")(x)               # made by new_head
        model.add_head("second", nn.Linear(100, 5))(x)
        model.use("first")(x)

    Only the head in use is trainable: an optimiser made now sees the body and this head, so that a posterior
    says nothing about weights that its data could not reach. The others keep their values.
    """

    def __init__(self, body: nn.Module, new_head: NewHead | None = None) -> None:
        super().__init__()
        self.body = body
        self.heads = nn.ModuleDict()
        self._new_head = new_head
        self._used: str | None = None

    @property
    def used(self) -> str | None:
        """The name of the head in use."""
        return self._used

    def add_head(self, name: str, head: nn.Module) -> "MultiHead":
        """A further head, which is then the one in use."""
        if not isinstance(name, str) or not name or "." in name or name in dir(nn.ModuleDict):
            raise InvalidValue(
                f"name={name!r} cannot name a head; give a string without dots, such as 'task_1'"
            )
        if name in self.heads:
            raise InvalidValue(
                f"there is a head {name!r} already; use({name!r}), or give the new one another name"
            )
        if not isinstance(head, nn.Module):
            raise InvalidType(f"head must be a module, got {type(head).__name__}")
        self.heads[name] = head
        return self.use(name)

    def use(self, name: str) -> "MultiHead":
        """Sends what follows through this head, and lets only this one learn."""
        if name not in self.heads:
            there = ", ".join(map(repr, self.heads)) or "none yet"
            raise InvalidValue(
                f"no head is called {name!r}; there are {there}. add_head({name!r}, module) makes it, or new_head="
            )
        for key, head in self.heads.items():
            head.requires_grad_(key == name)
        self._used = name
        return self

    def use_again(self, name: str | None) -> None:
        """Back to the head that was in use before, which may be none."""
        if name is None:
            self._used = None
        else:
            self.use(name)

    def arrive(self, name: str) -> "MultiHead":
        """`use`, for a task that may be new: its head is then made by `new_head`."""
        if name in self.heads or self._new_head is None:
            return self.use(name)
        return self.add_head(name, self._new_head())

    def forward(self, *inputs: Any) -> Any:
        if self._used is None:
            raise CallOrderError("no head is in use; arrive(name) or add_head(name, module) comes first")
        return self.heads[self._used](self.body(*inputs))
