"""Every error credo raises: one base class, and a standard exception beside each.

A message names the argument or parameter, its value, what is allowed, and the remedy.
Whatever raises leaves the mean, the curvature, the random streams and the files as they were.
"""


class CredoError(Exception):
    """The base of all of credo's errors."""


class InvalidValue(CredoError, ValueError):
    """An argument has the right type and a value that makes no sense."""


class EmptyBatch(InvalidValue):
    """A batch without examples; among several processes, an empty share of one."""


class InvalidType(CredoError, TypeError):
    """An argument is of a type that cannot be meant."""


class CallOrderError(CredoError, RuntimeError):
    """A call that is right by itself came at the wrong moment."""


class UnsupportedOperation(CredoError, NotImplementedError):
    """A model does something for which no exact answer exists here; the message names it."""


class NonFiniteError(CredoError, ArithmeticError):
    """Too many steps in a row had a non-finite loss, gradient or curvature."""


class IntegrityError(CredoError, OSError):
    """A file is not, byte for byte, what was written."""


class VersionError(CredoError, RuntimeError):
    """A file was written by a version that this one cannot read."""


class LockedError(CredoError, OSError):
    """Somebody else is writing to the run folder; the message names process and host."""


class RankLost(CredoError, RuntimeError):
    """Another process died, hung past the timeout or left; what this one had begun with the others did not happen."""


class FetchError(CredoError, ConnectionError):
    """A server did not answer, or not with the file."""


class TrainingWarning(UserWarning):
    """A training goes wrong: the message names the layer, the number and the remedy. One of each kind an optimiser."""
