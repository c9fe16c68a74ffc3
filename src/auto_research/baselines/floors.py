"""The three floors of the request table as arms of an adapter."""

from __future__ import annotations

from collections.abc import Callable

from auto_research.baselines import bias as bias_baseline
from auto_research.baselines import gbdt as gbdt_baseline
from auto_research.baselines import popularity as popularity_baseline
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for


def request_floors(experiment: Experiment, finish: Callable[[Measurement], Measurement] | None = None) -> None:
    """Register the arms `bias`, `popularity` and `gbdt`, which the card must name with role floor.

    finish: adds what the adapter measures beyond the protocol (a metric of its own) to each.
    """
    finish = finish or (lambda measured: measured)

    @experiment.arm
    def bias(ctx: Context) -> Measurement:
        return finish(bias_baseline.run(ctx, device=device_for(ctx.device)))

    @experiment.arm
    def popularity(ctx: Context) -> Measurement:
        return finish(popularity_baseline.run_requests(ctx, device=device_for(ctx.device)))

    @experiment.arm
    def gbdt(ctx: Context) -> Measurement:
        return finish(gbdt_baseline.run(ctx, device=device_for(ctx.device)))
