"""What looks at a tensor without computing with it: attributes, sizes, flags. None of it needs watching."""

from typing import Any

import torch

# These attributes are operations: their values have a gradient.
_COMPUTED = {"T", "mT", "H", "mH", "real", "imag"}
_METHODS = [
    "size",
    "dim",
    "numel",
    "nelement",
    "element_size",
    "stride",
    "storage_offset",
    "is_contiguous",
    "data_ptr",
    "untyped_storage",
    "get_device",
    "is_floating_point",
    "is_complex",
    "is_signed",
    "detach",
    "requires_grad_",
    "register_hook",
    "register_post_accumulate_grad_hook",
    "__hash__",
    "__len__",
    "__repr__",
    "__format__",
]


def _attributes() -> set[Any]:
    """The getters and setters of all attributes that are not operations."""
    found = set()
    for name in dir(torch.Tensor):
        attribute: Any = getattr(torch.Tensor, name, None)
        if type(attribute).__name__ in ("getset_descriptor", "property") and name not in _COMPUTED:
            found |= {attribute.__get__, attribute.__set__}
    return found


INSPECTIONS = frozenset(
    _attributes() | {getattr(torch.Tensor, name) for name in _METHODS} | {torch.is_grad_enabled}
)
