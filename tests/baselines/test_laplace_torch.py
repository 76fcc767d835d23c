"""The same numbers as laplace-torch, where that is installed; it is no dependency, since it brings many of its own.

Its Kronecker blocks have weight and bias apart, ours have [W b] together: the comparison is on layers without a bias.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import credo

laplace = pytest.importorskip("laplace", reason="laplace-torch is not installed")

X = torch.randn(40, 3, generator=torch.Generator().manual_seed(0))
Y = torch.arange(40) % 3
CASES = {
    ("diag", "all", True): "diagonal",
    ("kron", "all", False): "kronecker",
    ("kron", "last_layer", False): "last_layer",
}


def trained(bias: bool) -> nn.Module:
    with torch.random.fork_rng():
        torch.default_generator.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 5, bias=bias), nn.Tanh(), nn.Linear(5, 3, bias=bias))
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    for _ in range(100):
        optimizer.zero_grad()
        F.cross_entropy(model(X), Y).backward()
        optimizer.step()
    return model


@pytest.mark.parametrize("case", CASES)
def test_variances_and_marginal_likelihood(case: tuple[str, str, bool]) -> None:
    structure, subset, bias = case
    model = trained(bias)
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(X, Y), batch_size=40)
    other = laplace.Laplace(
        model, "classification", subset_of_weights=subset, hessian_structure=structure, prior_precision=0.7
    )
    other.fit(loader)
    q = credo.laplace(model, [(X, Y)], CASES[case], 0.7)  # type: ignore[arg-type]
    ours = torch.cat([v.flatten() for name, v in q.variance.items() if name not in q.deterministic])
    if structure == "diag":
        theirs = other.posterior_variance
    else:
        theirs = torch.linalg.inv(other.posterior_precision.to_matrix()).diagonal()
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)
    evidence = q.metadata["log_marginal_likelihood"]
    assert evidence == pytest.approx(float(other.log_marginal_likelihood()), rel=1e-4)
