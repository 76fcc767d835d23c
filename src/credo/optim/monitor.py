"""Says that a training goes wrong: one warning of each kind an optimiser, with the layer, the number and the remedy.

    refused     the first step that was refused, and what was not finite
    noise       the noise of a layer is much larger than its weights, and the loss has not fallen
    signal      the signal-to-noise of a layer stays low, and the loss has not fallen
    stalled     the loss has not fallen since the start
    diverged    the loss, or the weights of a layer, have grown out of proportion

Layers are looked at after steps 1, 10 and 100 and then every 500. Losses are put by and read
fifty at a time; so no step waits for the device.
"""

import sys
import warnings
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, final

import torch
from torch import Tensor

from credo.errors import TrainingWarning
from credo.kernels.update import all_finite
from credo.optim.diagnostics import LayerParameters, layers_of, parts_of
from credo.optim.loss_history import LossHistory
from credo.optim.statistics import StepStatistics

if TYPE_CHECKING:
    from credo.optim.base import BayesianOptimizer

FIRST_LOOKS, EVERY = (1, 10, 100), 500
WINDOW = 50  # losses that are read at once
# Noise of the size of the weights slows the start, and regularises later; a default never gives twice that.
LARGEST_NOISE = 2.0  # rms of σ over the rms of the weights
FIRST_NOISE_STEP = 10  # what starts at zero (positions, adapters) has had its first steps by then
# Wide layers have a low median by right; below a tenth the sign of nearly every weight is noise.
LOWEST_SIGNAL = 0.1  # median of |μ|/σ
LOW_LOOKS = 3  # in a row, from step 100 on: the noise may be large at first
# Outputs far from zero need large biases: a layer may grow by hundreds and be well.
LARGEST_GROWTH = 1e4  # of the rms of a layer's weights since the first step
SMALLEST_START = 1e-2  # for weights that start at zero
# Positions, adapters and last layers may start at zero; noise must be larger than that for them to begin at all.
SMALL = 0.1  # of torch's usual start, 1/√(3·fan-in): such layers are not compared with their noise
ENOUGH = 10_000  # weights of a layer that a median is taken of

_LESS_NOISE = {
    "VOGN": "Raise damping, lower tempering, or give neither: the noise is then relative to the weights",
    "NoisyKFAC": "Raise damping or lower tempering",
    "IVON": "Raise initial_curvature or lower tempering",
    "BayesByBackprop": "Lower initial_log_variance or tempering",
}
_TAME = "Lower lr; inputs and, in regression, targets should have mean 0 and variance 1"


class LayerLook(NamedTuple):
    """A layer at one moment."""

    name: str
    weights: float  # rms
    noise: float  # rms; 0 where there is none, or nobody asked
    signal: float  # median of |μ|/σ


@final
class Monitor:
    """What one optimiser has seen of its training, and which warnings it has given."""

    def __init__(self) -> None:
        self._given: set[str] = set()
        self.noted: list[Tensor] = []  # losses of the blocks since the last step
        self.losses: list[Tensor | float] = []  # of steps, not read yet; numbers where that needs no waiting
        self._course: LossHistory | None = None
        self.next_look = 1
        self._starts: dict[str, float] = {}  # rms of layers when they were first seen
        self._low: dict[str, int] = {}  # looks in a row at which a layer's signal was low

    def begin(self, groups: Sequence[dict[str, Any]], names: Mapping[int, str]) -> None:
        """Remembers how large the weights are before the first step."""
        for layer in layers_of(groups, names):
            self._starts[layer.name] = _rms([p.detach() for p in layer.members])

    def look(self, optimizer: "BayesianOptimizer") -> None:
        """After a step, with the mean in the parameters, where there is something to look at."""
        if len(self.losses) >= WINDOW:
            self._read_losses(optimizer)
        if optimizer.counters["step"] >= self.next_look:
            self._look_at_layers(optimizer, optimizer.counters["step"])

    def refused(self, optimizer: "BayesianOptimizer", gathered: StepStatistics, loss: Tensor | None) -> None:
        """A step is about to be refused, with its gradients still there."""
        if "refused" not in self._given:
            what = _not_finite(optimizer, gathered, loss)
            self._warn(
                optimizer,
                "refused",
                f"step {optimizer.counters['step'] + 1} was refused, and nothing has changed: {what}. Lower lr, or "
                "look at the data of this batch. counters['refused'] counts them; ten in a row are an error",
            )

    # Losses

    def _read_losses(self, optimizer: "BayesianOptimizer") -> None:
        losses, self.losses = _numbers(self.losses), []
        if self._course is None:  # a run that was resumed may begin at its end
            self._course = LossHistory(
                fresh=optimizer.counters["step"] <= WINDOW + optimizer.counters["refused"]
            )
        course = self._course
        course.add(losses)
        grown, stuck = course.diverged(), course.stalled()
        if grown is not None:
            self._warn(
                optimizer,
                "diverged",
                f"training diverges: the loss has grown from {grown[0]:.3g} to {grown[1]:.3g} by step "
                f"{optimizer.counters['step']}. {_TAME}",
            )
        elif stuck is not None:
            self._warn(
                optimizer,
                "stalled",
                f"the loss has not fallen in {course.steps} steps: {stuck[0]:.4g} at the start, {stuck[1]:.4g} now. If "
                "step_size in diagnostics(by='layer') is small, raise lr; if signal_to_noise is, the noise is too "
                "large; else look whether targets belong to their inputs. A network that was trained before may "
                "have nothing left to learn",
            )

    # Layers

    @torch.no_grad()
    def _look_at_layers(self, optimizer: "BayesianOptimizer", step: int) -> None:
        self.next_look = next((k for k in FIRST_LOOKS if k > step), step - step % EVERY + EVERY)
        if optimizer._reducer.sharded:  # no rank has a whole layer
            return
        layers = layers_of(optimizer.param_groups, optimizer.names())
        learns = self._course is not None and self._course.fell()  # with noise that was learned, then
        asked = optimizer._trains_with_noise and step >= FIRST_NOISE_STEP and not learns
        looks = [(layer, _look_at(optimizer, layer, asked)) for layer in layers]
        for _, look in looks:
            self._starts.setdefault(look.name, look.weights)
        self._compare_growth(optimizer, [look for _, look in looks])
        noisy = [
            look for layer, look in looks if look.noise and self._starts[look.name] > SMALL * _usual(layer)
        ]
        self._compare_noise(optimizer, noisy, step)
        if asked and step >= FIRST_LOOKS[-1]:
            self._compare_signal(optimizer, noisy, step)

    def _compare_growth(self, optimizer: "BayesianOptimizer", looks: list[LayerLook]) -> None:
        for look in looks:
            start = max(self._starts[look.name], SMALLEST_START)
            if look.weights > LARGEST_GROWTH * start:
                self._warn(
                    optimizer,
                    "diverged",
                    f"training diverges: the weights of layer {look.name!r} have grown from {start:.3g} (rms) to "
                    f"{look.weights:.3g} by step {optimizer.counters['step']}. {_TAME}",
                )

    def _compare_noise(self, optimizer: "BayesianOptimizer", looks: list[LayerLook], step: int) -> None:
        loud = [look for look in looks if look.noise > LARGEST_NOISE * look.weights]
        if loud:
            worst = max(loud, key=lambda look: look.noise / max(look.weights, 1e-30))
            self._warn(
                optimizer,
                "noise",
                f"the noise drowns the weights of layer {worst.name!r} at step {step}: its sd is {worst.noise:.3g} "
                f"(rms) on weights of {worst.weights:.3g}. It is more than {LARGEST_NOISE:g} times the weights in "
                f"{len(loud)} of {len(looks)} layers. {_remedy(optimizer)}",
            )

    def _compare_signal(self, optimizer: "BayesianOptimizer", looks: list[LayerLook], step: int) -> None:
        self._low = {
            look.name: self._low.get(look.name, 0) + 1 for look in looks if look.signal < LOWEST_SIGNAL
        }
        stay = [look for look in looks if self._low.get(look.name, 0) >= LOW_LOOKS]
        if stay:
            worst = min(stay, key=lambda look: look.signal)
            self._warn(
                optimizer,
                "signal",
                f"the signal-to-noise of layer {worst.name!r} stays below {LOWEST_SIGNAL:g}: its median of |mean|/sd "
                f"is {worst.signal:.2g} at step {step}, and low in {len(stay)} of {len(looks)} layers. "
                f"{_remedy(optimizer)}",
            )

    def _warn(self, optimizer: "BayesianOptimizer", kind: str, message: str) -> None:
        if kind not in self._given and optimizer._reducer.is_first:
            method = type(optimizer).__name__
            text = f"{method}: {message} (docs/gotchas.md)."
            warnings.warn(text, TrainingWarning, stacklevel=_levels_to_the_caller())
        self._given.add(kind)


def _levels_to_the_caller() -> int:
    """How far up the call is that is neither credo's nor torch's, as seen from the one who asks."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in (
        "credo",
        "torch",
    ):
        frame, level = frame.f_back, level + 1
    return level


def _remedy(optimizer: "BayesianOptimizer") -> str:
    return _LESS_NOISE.get(type(optimizer).__name__, "Lower the noise")


def _look_at(optimizer: "BayesianOptimizer", layer: LayerParameters, with_noise: bool) -> LayerLook:
    weights = _rms([p.detach() for p in layer.members])
    parts = parts_of(optimizer, layer) if with_noise and not layer.group["deterministic"] else []
    parts = [part for part in parts if part.mean.numel()]
    if not parts:
        return LayerLook(layer.name, weights, 0.0, float("inf"))
    step = -(-sum(part.mean.numel() for part in parts) // ENOUGH)
    ratios = [part.mean.abs().flatten()[::step] / part.sigma.flatten()[::step] for part in parts]
    return LayerLook(
        layer.name, weights, _rms([part.sigma for part in parts]), float(torch.cat(ratios).median())
    )


@torch.no_grad()
def _numbers(losses: Sequence[Tensor | float]) -> list[float]:
    """By one wait for the device."""
    waiting = [loss.reshape(()).double() for loss in losses if isinstance(loss, Tensor)]
    read = iter(torch.stack(waiting).tolist() if waiting else ())
    return [next(read) if isinstance(loss, Tensor) else loss for loss in losses]


def _usual(layer: LayerParameters) -> float:
    """The rms of weights at torch's usual start; infinite for layers without a matrix, such as norms and biases."""
    fans = [p[0].numel() for p in layer.members if p.dim() > 1 and len(p)]
    return (3 * max(fans)) ** -0.5 if fans else float("inf")


def _rms(tensors: list[Tensor]) -> float:
    squares = sum(float(torch.linalg.vector_norm(t, dtype=_wide(t))) ** 2 for t in tensors)
    return float((squares / max(sum(t.numel() for t in tensors), 1)) ** 0.5)


def _wide(tensor: Tensor) -> torch.dtype:
    """Some accelerators have no float64, but where there is one its numbers keep it."""
    return torch.float64 if tensor.is_cpu or tensor.dtype == torch.float64 else torch.float32


def _not_finite(optimizer: "BayesianOptimizer", gathered: StepStatistics, loss: Tensor | None) -> str:
    """Which of the numbers of a step it was, in the order in which they come to be."""
    if loss is not None and not bool(loss.isfinite().all()):
        return f"the loss is {float(loss)}"
    names, parameters = optimizer.names(), optimizer._trainable()
    bad = [p for p in parameters if p.grad is not None and not all_finite([p.grad])]
    if bad:
        return f"the gradient of {names[id(bad[0])]!r} is not finite, and of {len(bad)} of {len(parameters)} parameters"
    sizes = [
        (float(p.grad.abs().max()), names[id(p)]) for p in parameters if p.grad is not None and p.numel()
    ]
    size, largest = max(sizes, default=(0.0, "none"))
    told = f"the largest gradient, {size:.2g}, is that of {largest!r}"
    for key, numbers in gathered.by_parameter():
        if not all_finite([numbers]):
            return f"the curvature of {names[key]!r} is not finite; {told}"
    return f"a square overflows, or another process has a number that is not finite; {told}"
