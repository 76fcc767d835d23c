"""scikit-learn estimators with a posterior (extra `sklearn`): `pip install 'credo[sklearn]'`."""

try:
    import sklearn as _sklearn  # type: ignore[import-untyped]  # noqa: F401
except ImportError as error:
    raise ImportError("credo.sklearn needs scikit-learn: pip install 'credo[sklearn]'") from error

from credo.sklearn.classifier import VariationalClassifier
from credo.sklearn.regressor import VariationalRegressor

__all__ = ["VariationalClassifier", "VariationalRegressor"]
