"""What a user would take instead of a variational optimiser; all of it goes through `credo.predict`.

SWAG collects weights along the run of any optimiser. `laplace` puts a Gaussian around trained weights.
"""

from credo.baselines.laplace_fit import laplace
from credo.baselines.swag import SWAG, refresh_batch_norm

__all__ = ["SWAG", "laplace", "refresh_batch_norm"]
