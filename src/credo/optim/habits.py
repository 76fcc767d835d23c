"""Arguments that other optimisers have: answered with credo's name for them, and how to convert.

One table for all methods. What a method has under the same name never comes here; an answer names only arguments that
the method has.
"""

import difflib
import inspect
import warnings
from collections.abc import Callable, Collection
from functools import wraps
from typing import Any, TypeVar

from credo.errors import InvalidType, InvalidValue

Init = TypeVar("Init", bound=Callable[..., None])

_OLD_AND_NEW = "β₂ there weighs the old squares, ema_rate the new ones"
# Name elsewhere → (what it is here, how to convert), tried in order: the first whose arguments the method has.
_HABITS: dict[str, tuple[tuple[tuple[str, ...], str], ...]] = {
    "betas": (
        (("momentum", "ema_rate"), f"betas=(β₁, β₂) is momentum=β₁ and ema_rate=1 − β₂ ({_OLD_AND_NEW})"),
        (("inner",), "the inner optimiser has them: inner=lambda params: torch.optim.Adam(params, betas=…)"),
    ),
    "beta1": (
        (("momentum",), "it is momentum"),
        (("betas",), "it is the first of betas=(β₁, β₂)"),
        (("inner",), "the inner optimiser has it"),
    ),
    "beta2": (
        (("ema_rate",), f"ema_rate is 1 − β₂ ({_OLD_AND_NEW})"),
        (("betas",), "it is the second of betas=(β₁, β₂)"),
        (("inner",), "the inner optimiser has it"),
    ),
    "momentum": (
        (("betas",), "it is the first of betas=(β₁, β₂)"),
        (("inner",), "the inner optimiser has it"),
    ),
    "weight_decay": (
        (
            ("prior_precision",),
            "a prior does its work, as part of the posterior: prior_precision = weight_decay · data_size, for L2 "
            "in the loss "
            "(Adam, SGD) as for decoupled decay (AdamW)",
        ),
    ),
    "eps": (
        (
            ("damping",),
            "damping does its work; it is added to the mean squared gradient, not to its root. Leave it out at first",
        ),
        (("initial_curvature",), "the prior and initial_curvature keep steps finite. Leave it out"),
        (("inner",), "the inner optimiser has it"),
    ),
    "ess": (
        (("data_size",), "the effective sample size is data_size (times augmentation, divided by tempering)"),
    ),
    "hess_init": (
        (("initial_curvature",), "it is initial_curvature"),
        (("initial_log_variance",), "it is there as initial_log_variance, log σ²"),
    ),
    "nesterov": (
        (("momentum",), "momentum is the plain kind, as in SGD without nesterov. Leave it out"),
        (("lr",), "there is nothing like it here. Leave it out"),
    ),
    "dampening": (
        (("momentum",), "momentum is that of SGD with dampening=0. Leave it out"),
        (("lr",), "there is nothing like it here. Leave it out"),
    ),
    "learning_rate": ((("lr",), "it is lr"),),
    "clip_radius": (
        (
            ("lr",),
            "there is nothing like it here; nn.utils.clip_grad_norm_ between backward and step clips gradients",
        ),
    ),
    **dict.fromkeys(
        ("prior_std", "prior_sigma", "prior_scale", "sigma_prior"),
        ((("prior_precision",), "it is prior_precision = 1/σ²"),),
    ),
    **dict.fromkeys(("rho", "alpha"), ((("ema_rate",), f"ema_rate is 1 − {{name}} ({_OLD_AND_NEW})"),)),
    "rescale_lr": ((("lr",), "lr is used as it stands. Leave it out"),),
    "maximize": ((("lr",), "losses are minimised. Change the sign of the loss"),),
    "sync": (
        (
            ("sharded",),
            "several processes are found by themselves after torch.distributed.init_process_group. Leave it out",
        ),
    ),
    **dict.fromkeys(
        (
            "amsgrad",
            "foreach",
            "fused",
            "capturable",
            "differentiable",
            "decoupled_weight_decay",
            "debias",
            "hess_approx",
        ),
        ((("lr",), "there is nothing like it here, and nothing is lost. Leave it out"),),
    ),
    **dict.fromkeys(
        ("N", "num_data", "n_data", "dataset_size", "train_set_size", "num_examples"),
        ((("data_size",), "it is data_size"),),
    ),
    **dict.fromkeys(
        ("delta", "prior_prec", "prior_var"), ((("prior_precision",), "it is prior_precision, 1/variance"),)
    ),
    **dict.fromkeys(("tau", "temperature"), ((("tempering",), "it is tempering"),)),
    **dict.fromkeys(("num_samples", "n_samples", "samples"), ((("mc_samples",), "it is mc_samples"),)),
}
_OF_ADAM = (1e-3, 5e-4, 3e-4, 2e-4, 1e-4)


def answer(name: str, known: Collection[str]) -> str:
    """What to say about an argument that a method does not have."""
    for wanted, text in _HABITS.get(name, ()):
        if set(wanted) <= set(known):
            text = text.replace("{name}", name)
            return f"Here {text}." if text[0].islower() else text
    near = difflib.get_close_matches(name, known, 1)
    return f"Did you mean {near[0]!r}?" if near else ""


def answered(init: Init) -> Init:
    """A constructor that answers arguments it does not have."""
    signature = inspect.signature(init)
    known = [name for name in signature.parameters if name != "self"]

    @wraps(init)
    def checked(self: Any, *args: Any, **kwargs: Any) -> None:
        method = type(self).__name__
        if type(self).__init__ is not checked:  # called by a subclass, which has been asked
            init(self, *args, **kwargs)
            return
        for name, value in kwargs.items():
            if name not in known:
                raise InvalidType(
                    f"{method} has no argument {name!r} (got {value!r}). {answer(name, known)} It has: "
                    f"{', '.join(known)}."
                )
        try:
            given = signature.bind(self, *args, **kwargs).arguments
        except TypeError as error:
            raise InvalidType(f"{method}: {_explained(error)}") from None
        _warn_of_adam(method, given)
        init(self, *args, **kwargs)

    return checked  # type: ignore[return-value]


class Answering:
    """Constructors of all subclasses answer."""

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "__init__" in cls.__dict__:
            cls.__init__ = answered(cls.__init__)  # type: ignore[method-assign]


def _explained(error: TypeError) -> str:
    text = str(error)
    if "data_size" in text:
        return "data_size is missing, the number of training examples: data_size=len(train_set)."
    if "positional" in text:
        return "only params and lr may come without names; betas, weight_decay and the like have other names here."
    return f"{text}."


# What makes a number of Adam's a step of the right size, where it is given too, and what the step is without.
_SCALES = {
    **dict.fromkeys(
        ("VOGN", "OGN", "KFAC", "NoisyKFAC"),
        (
            "damping",
            "Here a step is lr·m/(s + γ), with squares and not their roots, so that the same number means something "
            "else",
        ),
    ),
    "IVON": (
        "initial_curvature",
        "Here a step is lr·m/(h + δ̃), and h starts at 0.5 and moves slowly, so that such an lr hardly moves the "
        "weights; IVON's usual lr is 0.1",
    ),
}


def _warn_of_adam(method: str, given: dict[str, Any]) -> None:
    """lr=1e-3 is Adam's, whose steps are of that size; here a step is lr times the gradient by its curvature."""
    lr = given.get("lr")
    if method not in _SCALES or not isinstance(lr, float) or lr not in _OF_ADAM:
        return
    beside, what = _SCALES[method]
    if given.get(beside) is None:
        warnings.warn(
            f"{method}(lr={lr:g}): this looks like Adam's lr. {what}. Leave lr out: a step is then of a size that fits "
            f"each tensor. To keep the number, give {beside} too.",
            stacklevel=4,
        )


def refuse_unknown(group: Collection[str], known: Collection[str]) -> None:
    """For the options of a parameter group."""
    for name in sorted(group):
        raise InvalidValue(
            f"unknown option {name!r} in a parameter group; there are {sorted(known)}. {answer(name, known)}".rstrip()
        )
