"""The three floors of the request table as arms of an adapter."""

from __future__ import annotations

from auto_research.baselines import bias as bias_baseline
from auto_research.baselines import gbdt as gbdt_baseline
from auto_research.baselines import popularity as popularity_baseline
from auto_research.experiment.context import Context
from auto_research.experiment.contract import Experiment, Measurement
from auto_research.runtime.devices import device_for


def request_floors(experiment: Experiment) -> None:
    """Register the arms `bias`, `popularity` and `gbdt`, which the card must name with role floor."""

    @experiment.arm
    def bias(ctx: Context) -> Measurement:
        return bias_baseline.run(ctx, device=device_for(ctx.device))

    @experiment.arm
    def popularity(ctx: Context) -> Measurement:
        return popularity_baseline.run_requests(ctx, device=device_for(ctx.device))

    @experiment.arm
    def gbdt(ctx: Context) -> Measurement:
        return gbdt_baseline.run(ctx, device=device_for(ctx.device))
