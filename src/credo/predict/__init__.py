"""Prediction: a posterior draws functions, their answers are averaged."""

from credo.predict.dropout import DropoutPosterior
from credo.predict.ensemble import Ensemble
from credo.predict.functions import DrawsFunctions, Functions
from credo.predict.inputs import Batch
from credo.predict.predict import predict
from credo.predict.prediction import MultilabelPrediction, Prediction, RegressionPrediction

__all__ = [
    "Batch",
    "DrawsFunctions",
    "DropoutPosterior",
    "Ensemble",
    "Functions",
    "MultilabelPrediction",
    "Prediction",
    "RegressionPrediction",
    "predict",
]
