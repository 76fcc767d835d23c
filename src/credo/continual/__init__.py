"""Task after task without the old data: yesterday's posterior is today's prior; and what it is compared with."""

from credo.continual.ewc import EWC, fisher
from credo.continual.heads import MultiHead
from credo.continual.learner import Learner, annealed, cross_entropies, merged, prior_for, reset_parameters
from credo.continual.loop import Course, learn, remaining_distance, share_left
from credo.continual.point import Point
from credo.continual.tasks import Coreset, Task
from credo.continual.variational import Variational

__all__ = [
    "Task",
    "learn",
    "Course",
    "Learner",
    "Variational",
    "Point",
    "EWC",
    "fisher",
    "MultiHead",
    "Coreset",
    "prior_for",
    "merged",
    "reset_parameters",
    "cross_entropies",
    "annealed",
    "remaining_distance",
    "share_left",
]
