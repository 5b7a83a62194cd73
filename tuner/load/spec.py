"""What the load generator is asked, and what it answers; both cross a process boundary."""

from __future__ import annotations

from dataclasses import dataclass

from objectives import Load, MeterHealth, RequestRecord, Slo
from tuner.records import MeterLimits
from tuner.workloads import ProbeShape, RequestPlan, TokenRatios, Workload


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """One probe to drive.

    Attributes:
        base_url: of the engine, as `http://127.0.0.1:8000`.
        model: the served name.
        workload: what to send.
        ratios: tokens per character of the texts.
        seed: of the request plan.
        load: how hard.
        requests: how many measured requests.
        limits: when the meter calls itself the bottleneck.
        attempt: counts repetitions on one engine, whose prompts must not be in its cache.
        api_key: sent as the bearer token.
        stop_for: end as soon as it is clear that this fails; None drives to the end.
        may_look_fine: whether it may also measure fewer requests as soon as that looks fine.
    """

    base_url: str
    model: str
    workload: Workload
    ratios: TokenRatios
    seed: int
    load: Load
    requests: int
    limits: MeterLimits
    attempt: int = 0
    api_key: str = "none"
    stop_for: Slo | None = None
    may_look_fine: bool = True

    @property
    def plan(self) -> RequestPlan:
        """The requests to send: the same at every load, but for how their prompts open.

        So no probe finds the prompts of an earlier one in the engine's prefix cache.
        """
        salt = f"{self.load.value:g}/{self.attempt}"
        return RequestPlan(self.workload, seed=self.seed, ratios=self.ratios, salt=salt)

    @property
    def shape(self) -> ProbeShape:
        """Which of them warm up, are measured, and fill."""
        return ProbeShape(self.load, self.requests)


@dataclass(frozen=True, slots=True)
class MeterReport:
    """What came of a probe.

    Attributes:
        records: every request, times relative to `origin_s`.
        origin_s: the probe's start on the machine's monotonic clock.
        window_start_s: relative to the origin, as the rest.
        window_end_s: the last measured arrival, or the end where there are too few.
        end_s: when the last measured request was done.
        health: of the meter itself.
        stopped: why the probe ended early, or empty.
        is_stalled: whether it ended because no token came any more.
        stopped_early: why the SLO was seen to fail before the last request, or empty.
    """

    records: tuple[RequestRecord, ...]
    origin_s: float
    window_start_s: float
    window_end_s: float
    end_s: float
    health: MeterHealth
    stopped: str = ""
    is_stalled: bool = False
    stopped_early: str = ""
