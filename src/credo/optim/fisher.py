"""Labels drawn from the model itself, for the true Fisher: Σᵢ −log p(ŷᵢ | f(xᵢ)), ŷᵢ ~ p(· | f(xᵢ))."""

import struct
from hashlib import blake2b

import torch
import torch.nn.functional as F
from torch import Tensor

from credo.errors import InvalidType, InvalidValue

LIKELIHOODS = ("categorical", "gaussian")


def private_generator(seed: int, draw: int, call: int, device: torch.device) -> torch.Generator:
    """A stream that depends on nothing but its key."""
    key = blake2b(struct.pack("<QQQ", seed, draw, call), digest_size=7, person=b"fisher").digest()
    return torch.Generator(device).manual_seed(int.from_bytes(key, "little"))


def sampled_loss(outputs: Tensor, likelihood: str, generator: torch.Generator) -> Tensor:
    """The summed negative log-likelihood of labels drawn from it.

    "categorical": outputs are logits (M, classes), the loss is the cross-entropy. "gaussian": outputs (M, …) are
    means with unit variance, the loss is half the squared error.
    """
    if likelihood == "gaussian":
        noise = torch.randn(outputs.shape, generator=generator, device=outputs.device, dtype=outputs.dtype)
        return 0.5 * (outputs - (outputs.detach() + noise)).square().sum()
    probabilities = outputs.detach().float().softmax(1)
    if not bool(probabilities.isfinite().all()):
        return outputs.sum() * float("nan")  # the step is refused, as for any other loss that is not finite
    labels = torch.multinomial(probabilities, 1, generator=generator)[:, 0]
    return F.cross_entropy(outputs, labels, reduction="sum")


def check_outputs(outputs: object, likelihood: str) -> None:
    if likelihood not in LIKELIHOODS:
        raise InvalidValue(
            f"likelihood must be one of {', '.join(map(repr, LIKELIHOODS))}, got {likelihood!r}."
        )
    if not isinstance(outputs, Tensor) or not outputs.requires_grad:
        kind = "a tensor without a graph" if isinstance(outputs, Tensor) else type(outputs).__name__
        raise InvalidType(f"outputs must be what the model returned in this block, got {kind}.")
    if likelihood == "categorical" and outputs.dim() != 2:
        raise InvalidValue(
            f"outputs of a categorical likelihood must be logits (M, classes); got {tuple(outputs.shape)}."
        )
