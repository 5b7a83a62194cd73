"""The one stream of what happens in a run; log file, live table and web page read it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

# Carries `wall_s`: how long a session worked; a resumed run has several.
SESSION_ENDED = "session_ended"
# Carries `worker`: which one gets no more work, because it is slower than the others.
WORKER_SET_ASIDE = "worker_set_aside"
# Carries `worker`, `gpu_ids` and `reason`: something of an engine is left there, or its GPU failed.
WORKER_QUARANTINED = "worker_quarantined"
# Carries `worker` and `reason`: what is left although the run is over.
NOT_CLEAN = "not_clean"
# Carries `trial`, `load` and those `checks` of the SLO that its fresh measurements do not certify.
NOT_CERTIFIED = "not_certified"
# Carries `trials` it was learned from, `predicted` settings, `picks` and `wall_s`.
PRIOR_LEARNED = "prior_learned"
# Carries `median_error` of another run's calibration on the defaults, and `is_trusted`.
PRIOR_CHECKED = "prior_checked"
# Carries `rank_correlation` of predictions with so many measured `trials`.
PRIOR_WATCHED = "prior_watched"
# Carries the same, and `is_carried`: whether it was another run's calibration that ranked wrongly,
# and the run's own takes its place; else the simulator guides no further trial.
PRIOR_DROPPED = "prior_dropped"
# Carries `reason`: the simulator could not be learned, or not be asked.
PRIOR_FAILED = "prior_failed"
PRIOR_EVENTS = (PRIOR_LEARNED, PRIOR_CHECKED, PRIOR_WATCHED, PRIOR_DROPPED, PRIOR_FAILED)


@dataclass(frozen=True, slots=True)
class Event:
    """Something happened.

    Attributes:
        kind: as `trial_started`.
        details: plain data, for `events.jsonl`.
        record: the object it is about, for listeners in this process; not written.
    """

    kind: str
    details: Mapping[str, Any] = field(default_factory=dict)
    record: Any = None


Listener = Callable[[Event], None]
