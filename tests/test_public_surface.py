"""The names that users write, their arguments and the defaults: a contract."""

import inspect

import pytest

import credo

GAUSS_NEWTON = (
    "params, lr=None, *, data_size, momentum=0.9, ema_rate=0.1, prior_precision=None, prior=None, damping=None, "
    "tempering=None, averaging=None"
)
KRONECKER = (
    "params, lr=None, *, data_size, momentum=0.9, ema_rate=0.1, prior_precision=None, prior=None, damping=None, "
    "damping_form='eigen', tempering=None"
)
FACTORS = (
    "factor_interval=10, inverse_interval=100, fisher='empirical', sharing='expand', reduction='mean', seed=0"
)
SIGNATURES = {
    "VOGN": f"{GAUSS_NEWTON}, mc_samples=1, mc_slices=1, vectorized=False, augmentation=1.0, initial_curvature=None, "
    "initial_precision=None, reduction='mean', seed=0, shared_noise=False, sharded=False, mc_groups=None",
    "OGN": f"{GAUSS_NEWTON}, augmentation=1.0, initial_curvature=None, initial_precision=None, reduction='mean', "
    "seed=0, sharded=False, mc_groups=None",
    "IVON": "params, lr=None, *, data_size, betas=(0.9, 0.99999), prior_precision=None, prior=None, tempering=None, "
    "averaging=None, mc_samples=1, augmentation=1.0, initial_curvature=None, clip_radius=None, reduction='mean', "
    "seed=0, shared_noise=False, sharded=False, mc_groups=None",
    "KFAC": f"{KRONECKER}, augmentation=1.0, {FACTORS}, sharded=False, mc_groups=None",
    "NoisyKFAC": f"{KRONECKER}, mc_samples=1, augmentation=1.0, {FACTORS}, shared_noise=False, sharded=False, "
    "mc_groups=None",
    "predict": "model, posterior, inputs, *, samples=10, seed=0, task='classification'",
    "evaluate": "prediction, targets, ood=None, *",
    "capture": "parameters, reduction='mean', *",
    "squared_gradients": "model, loss, reduction='mean'",
    "load_posterior": "path",
}
METHODS = {
    "sampled": "self, *, scale=None",
    "step": "self, closure=None",
    "posterior": "self",
    "state_dict": "self",
    "load_state_dict": "self, state_dict",
    "diagnostics": "self, by='group'",
    "accumulate": "self, micro_batches",
    "pending": "self",
    "names": "self",
    "add_param_group": "self, param_group",
    "zero_grad": "self, set_to_none=True",
}
OPTIMIZERS = ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC", "BayesByBackprop")


def written(function: object) -> str:
    """A signature as one writes it, without types."""
    parameters = list(inspect.signature(function).parameters.values())
    bare = [p.replace(annotation=inspect.Parameter.empty) for p in parameters]
    return str(inspect.Signature(bare)).strip("()")


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stay(name: str) -> None:
    assert written(getattr(credo, name)).startswith(SIGNATURES[name])


def test_those_of_bayes_by_backprop_stay() -> None:
    names = list(inspect.signature(credo.BayesByBackprop).parameters)
    assert names == [
        *("params", "lr", "data_size", "inner", "prior_precision", "prior", "tempering", "mc_samples"),
        *("convolution_samples", "vectorized", "local", "augmentation", "initial_log_variance"),
        *("initial_mean_sd", "reduction", "seed", "shared_noise", "sharded"),
    ]


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_verbs_stay(optimizer: str, method: str) -> None:
    assert written(getattr(getattr(credo, optimizer), method)).startswith(METHODS[method])


def test_further_verbs_stay() -> None:
    for name in ("VOGN", "OGN", "KFAC", "NoisyKFAC"):
        assert written(getattr(credo, name).posterior) == "self, *, damped=True"
    for name in ("VOGN", "OGN", "IVON", "KFAC", "NoisyKFAC"):
        assert written(getattr(credo, name).curvature) == "self"
    for name in ("VOGN", "OGN"):
        assert written(getattr(credo, name).supply) == "self, squares, examples"
    for name in ("KFAC", "NoisyKFAC"):
        assert written(getattr(credo, name).observe) == "self, outputs, likelihood='categorical'"
        assert written(getattr(credo, name).factors) == "self"
    assert written(credo.BayesByBackprop.kl) == "self"


def test_names_stay() -> None:
    names = {*OPTIMIZERS, "TemperingSchedule", "load_posterior", "predict", "evaluate", "metrics", "capture"}
    names |= {
        "squared_gradients",
        "kronecker_factors",
        "DiagonalPosterior",
        "KroneckerPosterior",
        "Posterior",
    }
    assert names <= set(credo.__all__)
    assert set(credo.optim.__all__) == {
        *OPTIMIZERS,
        "BayesianOptimizer",
        "GroupDiagnostics",
        "TemperingSchedule",
    }
