"""The best of a run's validations so far, and when to stop waiting for a better one."""

import dataclasses
import math
import re
from collections.abc import Iterable, Mapping
from typing import Any, Self

from runtime.terminal import RunError

SMALLER_IS_BETTER = re.compile(".*loss|.*perplexity|bits_per_byte|brier_score|ter")  # as in lm-eval-harness


@dataclasses.dataclass
class Best:
    """The best value of one metric. Checkpoints keep it: a resumed run stops at the same step as without the stop."""

    by: str  # the metric's name in metrics.jsonl: validation_loss
    step: int = 0  # updates of the weights; 0: there was none yet
    value: float = float("nan")
    since: int = 0  # validations after it

    @classmethod
    def of(cls, by: str, known: Iterable[str], attributes: Mapping[str, Any]) -> Self:
        """The best in a checkpoint with these attributes, if it is of this metric. Raises RunError: no known metric."""
        if by not in (known := list(known)):
            raise RunError(f"best_by = {by}: a validation of this run gives {', '.join(known)}")
        kept = attributes.get("best") or {}
        return cls(**kept) if kept.get("by") == by else cls(by)

    def note(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the metrics of the validation after this step; what is not finite is never the best."""
        name = self.by.rpartition("/")[2].partition(",")[0]  # of score/glossary.jsonl/acc, or score/gsm8k/acc,FILTER
        value, sign = values[self.by], -1 if SMALLER_IS_BETTER.fullmatch(name) else 1
        is_better = math.isfinite(value) and (not self.step or sign * value > sign * self.value)
        self.step, self.value, self.since = (step, value, 0) if is_better else (self.step, self.value, self.since + 1)
