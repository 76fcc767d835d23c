"""How wide a posterior should be, and how sharp its predictions: two numbers, fitted on validation data."""

from credo.calibration.calibrate import Calibration, calibrate

__all__ = ["Calibration", "calibrate"]
