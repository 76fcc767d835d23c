"""Predictions with a guarantee for a table: intervals that hold, and which doubt is whose.

    pip install 'credo[sklearn]'; python -m examples.tabular

The disease of 442 patients after a year: 90 % intervals by split-conformal prediction, and a table for new patients.
"""

from sklearn.datasets import load_diabetes
from sklearn.model_selection import train_test_split

from credo.sklearn import VariationalRegressor


def main(max_iter: int = 100) -> float:
    x, y = load_diabetes(return_X_y=True, as_frame=True)
    x_train, x_test, y_train, y_test = train_test_split(x, y, random_state=0)
    model = VariationalRegressor(coverage=0.9, max_iter=max_iter, random_state=0).fit(x_train, y_train)
    table = model.predict_uncertainty(x_test)
    inside = ((table["lower"] <= y_test) & (y_test <= table["upper"])).mean()
    print(table.head().round(1).to_string())
    print(f"R² {model.score(x_test, y_test):.2f}; {inside:.0%} of the intervals hold")
    return float(inside)


if __name__ == "__main__":
    main()
