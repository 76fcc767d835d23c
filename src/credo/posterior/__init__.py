"""Gaussian posteriors over named weights: what training leaves, independent of the optimiser."""

from credo.posterior.base import Posterior, Prior, Weights
from credo.posterior.diagonal import DiagonalPosterior
from credo.posterior.elbo import Elbo, elbo
from credo.posterior.files import load_posterior, register_kind
from credo.posterior.kronecker import KroneckerPosterior
from credo.posterior.low_rank import LowRankPosterior
from credo.posterior.matrix_normal import Layer, Root

__all__ = [
    "DiagonalPosterior",
    "Elbo",
    "KroneckerPosterior",
    "Layer",
    "LowRankPosterior",
    "Posterior",
    "Prior",
    "Root",
    "Weights",
    "elbo",
    "load_posterior",
    "register_kind",
]
