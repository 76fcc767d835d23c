"""What runs where tensors are not on the CPU: one function for each task, and who offers it.

Every task has an implementation in plain torch (`accelerator_noise`, `accelerator_sums`, `accelerator_update`), made
for devices that like few large calls: its launches do not grow with the number of examples, and what it needs of
memory is cut to a budget of bytes. Kernels of a device's own stand behind the same names: `offer` puts a function in
front of the plain one, which runs where that answers NotImplemented.

Nothing here waits for the device, and nothing is copied to it or from it.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from credo.errors import InvalidValue

BUDGET = 128 << 20  # bytes that one call may have beside its results, unless it was told
TASKS = (
    *("sample", "perturb"),  # accelerator_noise
    *("all_finite", "vogn", "ivon", "restore"),  # accelerator_update
    *("row_sums", "convolution_sums", "batch_norm_backward"),  # accelerator_sums
)

Function = Callable[..., Any]
_plain: dict[str, Function] = {}
_offered: dict[str, list[Function]] = {task: [] for task in TASKS}
_asked: list[str] = []  # who was asked what they offer
_budget = [BUDGET]


def plain(function: Function) -> Function:
    """Marks the implementation in plain torch of the task that it is named after."""
    assert function.__name__ in TASKS, function.__name__
    _plain[function.__name__] = function
    return function


def offer(task: str, function: Function) -> None:
    """Puts `function` before those that are known: asked first, it may answer NotImplemented for these arguments."""
    if task not in _offered:
        raise InvalidValue(f"there is no task {task!r}; allowed: {', '.join(TASKS)}.")
    _offered[task].insert(0, function)


def run(task: str, *arguments: Any) -> Any:
    """The task, by the first implementation that takes these arguments."""
    if not _asked:
        _asked.append("triton")
        import_module("credo.kernels.triton.offers").offer_all()  # which does not import Triton yet
    for function in _offered[task]:
        if (found := function(*arguments)) is not NotImplemented:
            return found
    return (_plain.get(task) or _loaded(task))(*arguments)


def _loaded(task: str) -> Function:
    """The plain one, whose files are loaded when there is a tensor for them."""
    for name in ("noise", "sums", "update"):
        import_module(f"credo.kernels.accelerator_{name}")
    return _plain[task]


def scratch_bytes(size: int | None = None) -> int:
    """Bytes that one call of a kernel may use on an accelerator beside its results; sets them where `size` is given.

    More means fewer and larger launches. It holds for the whole process, also for the threads of a backward pass.

    >>> import credo
    >>> before = credo.kernels.scratch_bytes()
    >>> credo.kernels.scratch_bytes(512 << 20)
    536870912
    >>> credo.kernels.scratch_bytes(before) == before
    True
    """
    if size is not None:
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise InvalidValue(f"size={size!r} must be a whole number of bytes, 1 at least.")
        _budget[0] = size
    return _budget[0]
