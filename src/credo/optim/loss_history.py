"""How the losses of a training went: whether they have fallen since the start, and whether they grow out of proportion.

Losses of minibatches are noisy, so what is compared are means, with their standard errors. `now` is the mean over the
later half of all steps so far.

The loss *has fallen*, for good, if `now` lies more than 3 % and the noise below the first loss, the mean of the first
three, of the first ten, or of the first fifth: a training may learn all it can in its first steps.
It *has diverged* if it has grown a thousandfold, or if most losses of the later half are far above the first.
It *stands still* if it is sure that `now` lies less than 3 % below the mean of the first fifth. Where the losses are
too noisy to be sure of either, nothing is said, and it is asked again when there are more of them.
"""

import statistics
from collections.abc import Sequence
from typing import final

LOOKS = (500, 1000, 2000, 5000)  # numbers of steps after which it is asked; after the last, no more
FALLEN = 0.03  # of the loss at the start; a network that stays at chance gains less as its biases settle
CLEARLY = 0.3  # of the loss at the start, for a look at a few losses under much noise
FIRST = 10
SURE = 3.0  # standard errors: there are four looks, and none should speak by chance
LIKELY = 2.0  # … for a fall in the first steps, of which there are few
SURE_OF_ONE = 3.0  # standard deviations of a single loss
# A pretrained network starts near zero, and noise alone may multiply its loss by a hundred.
LARGEST_GROWTH = 1000.0  # of a mean over some steps over the median of the first three losses
BEGINNING = 3  # one of them may be small by luck; after more, a fast divergence is no longer a growth
# A divergence in the first step has no losses to grow from but the first.
RISEN = 3.0  # median of the later half over the first loss
COSTLY = 12.0  # nats, more than a guess among 100,000 classes: noise on a pretrained network costs less


@final
class LossHistory:
    """`fresh`: whether it has seen the training from its first step; else nothing is said of standing still."""

    def __init__(self, fresh: bool):
        self.steps = 0
        self._watching = fresh
        self._losses: list[float] = []  # all of them, as long as somebody asks whether they move
        self._first: list[float] = []
        self._medians: list[float] = []  # of those that came first, and of those that came last
        self._last = 0.0  # the mean of those that came last

    def add(self, losses: Sequence[float]) -> None:
        """Those of the next steps."""
        self.steps += len(losses)
        self._first += losses[: max(FIRST - len(self._first), 0)]
        self._last, self._medians = statistics.fmean(losses), [*self._medians[:1], statistics.median(losses)]
        if self._watching:
            self._losses += losses

    def diverged(self) -> tuple[float, float] | None:
        """The loss at the start and now, if it has grown out of proportion."""
        start = statistics.median(map(abs, self._first[:BEGINNING]))
        if self._last > LARGEST_GROWTH * max(start, 1e-30):
            return start, self._last
        if not self._watching or self.steps not in LOOKS:
            return None
        first, late = self._first[0], self._losses[self.steps // 2 :]
        return (
            (first, statistics.fmean(late)) if statistics.median(late) > max(RISEN * first, COSTLY) else None
        )

    def fell(self) -> bool:
        """Whether the losses that came last are clearly below those that came first."""
        start, last = self._medians[0], self._medians[-1]
        return last < start - CLEARLY * abs(start)

    def stalled(self) -> tuple[float, float] | None:
        """The loss at the start and now, if it stands still; to be asked after every `add`."""
        if not self._watching or self.steps not in LOOKS:
            return None
        start, late = self._losses[: self.steps // 5], self._losses[self.steps // 2 :]
        before, now = statistics.fmean(start), statistics.fmean(late)
        error = (statistics.pvariance(start) / len(start) + statistics.pvariance(late) / len(late)) ** 0.5
        fallen = before - now > SURE * error + FALLEN * abs(before) or self._fell_at_once(now, late)
        still = not fallen and max(before - now, 0.0) + SURE * error <= FALLEN * abs(before)  # both may be 0
        if fallen or still or self.steps == LOOKS[-1]:
            self._watching, self._losses = False, []
        return (before, now) if still else None

    def _fell_at_once(self, now: float, late: Sequence[float]) -> bool:
        spread, small = statistics.pstdev(late), FALLEN * abs(now)
        if self._first[0] - now > SURE_OF_ONE * spread + small:
            return True
        return any(
            statistics.fmean(self._first[:count]) - now > LIKELY * spread * count**-0.5 + small
            for count in (BEGINNING, FIRST)
        )
