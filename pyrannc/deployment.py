"""Choice of a model's layout: forced, loaded from a file, or the fastest that fits.

A deployment is a plan in the format of `varuna plan`.
"""

import logging
import math
import os
from collections.abc import Sequence

import msgspec

from pyrannc.configuration import Configuration
from pyrannc.layouts import (
    SCHEDULE,
    DeploymentTask,
    LayoutChoices,
    balanced_spans,
    best_uneven_layout,
    microbatch_sizes,
    separable_cuts,
    stage_map_of,
)
from pyrannc.model_costs import DeploymentCosts, data_parallel, deployment_costs
from varuna.errors import PlanError
from varuna.plan.cost.forecast import forecast_plan
from varuna.plan.plan_file import PinnedPlan, StageContents, read_plan
from varuna.plan.search.explanation import why_slower
from varuna.plan.search.search import cut_layout
from varuna.train.validate import plan_stages
from varuna.types import Plan, Profile, Proposal, StageMap, spread_evenly
from varuna.units import duration

log = logging.getLogger("pyrannc.plan")

SAME_TIME = 1.05
"""Times within this factor count as equal: the simpler layout wins."""


def choose(task: DeploymentTask, configuration: Configuration, measured: Profile | None = None) -> PinnedPlan:
    """Choose a layout by measured costs, or by estimates; raise PlanError if nothing fits."""
    layouts = LayoutChoices(task.world, task.captured.num_segments, configuration)
    costs = deployment_costs(task, configuration, measured)
    if layouts.forced and configuration.pipeline_num:
        pinned = _forced_plan(task, configuration, layouts.maps[0], costs)
    else:
        pinned = _fastest_plan(task, configuration, layouts, costs)
    return msgspec.structs.replace(
        pinned,
        contents=_stage_contents(task, pinned.plan),
        plain=data_parallel(task, costs),
        cluster=costs.cluster,
        basis=costs.basis,
        speed=costs.speed,
    )


def _stage_contents(task: DeploymentTask, plan: Plan) -> tuple[StageContents, ...]:
    contents = []
    for stage in plan.stages:
        segments = task.captured.graph.segments[stage.first : stage.stop]
        names = {name for segment in segments for name in segment.parameters}
        contents.append(
            StageContents(
                sum(segment.num_operations for segment in segments),
                sum(math.prod(task.source.shape(name)) for name in names),
            )
        )
    return tuple(contents)


def _fastest_plan(
    task: DeploymentTask, configuration: Configuration, layouts: LayoutChoices, costs: DeploymentCosts
) -> PinnedPlan:
    proposals, refused = _even_proposals(task, configuration, layouts, costs)
    if configuration.dp_search_all or not any(_is_simplest(p.plan, configuration) for p in proposals):
        uneven = best_uneven_layout(
            task,
            configuration,
            costs.profile,
            costs.cluster,
            depths=layouts.uneven_depths,
            even_seconds=min((proposal.forecast.seconds for proposal in proposals), default=math.inf),
        )
        proposals += [] if uneven is None else [uneven]
    if not proposals and (layouts.forced or configuration.partition_num):  # runs, whatever it costs
        even = spread_evenly(task.world, parts=max(1, configuration.partition_num))
        stage_map = layouts.maps[0] if layouts.forced else stage_map_of(even)
        return _forced_plan(task, configuration, stage_map, costs)
    if not proposals:
        raise PlanError(
            f"no layout of {task.world} ranks fits the memory; the smallest: {refused[-1]} (use more ranks, "
            "devices with more memory, or a smaller batch; or change mem_limit_gb and mem_margin)"
        )
    best = _best(proposals, configuration)
    return PinnedPlan(
        best.plan,
        best.forecast,
        best.idle,
        best.reason,
        runners_up=_runners_up(proposals, best),
        refused=tuple(refused),
    )


def _even_proposals(
    task: DeploymentTask, configuration: Configuration, layouts: LayoutChoices, costs: DeploymentCosts
) -> tuple[list[Proposal], list[str]]:
    """Return the best cut of each layout and micro-batch size, and the reasons why others do not fit."""
    proposals: list[Proposal] = []
    refused: list[str] = []
    for stage_map in layouts.maps:
        depth, widths = len(stage_map), {len(ranks) for ranks in stage_map}
        for size in sorted(set(microbatch_sizes(task, configuration, min(widths))), reverse=True):
            try:
                proposal = cut_layout(
                    costs.profile,
                    costs.cluster,
                    stage_map,
                    batch_size=task.batch_size,
                    microbatch_size=size,
                    schedule=SCHEDULE,
                    recompute=configuration.checkpointing,
                    headroom=configuration.mem_margin,
                    cuts=separable_cuts(task.captured) if len(widths) > 1 else None,
                    suggest=False,
                )
            except PlanError as error:
                refused.append(f"micro-batches of {size}, {error}")
                continue
            log.info("%d stages, micro-batches of %d: %s", depth, size, duration(proposal.forecast.seconds))
            proposals.append(proposal)
    return proposals, refused


def _best(proposals: Sequence[Proposal], configuration: Configuration) -> Proposal:
    """Return one stage without recompute if it fits, else the fastest; of equally fast ones, the simplest."""

    def simplest(proposals: Sequence[Proposal]) -> Proposal:
        shortest = min(proposal.forecast.seconds for proposal in proposals)
        near = [proposal for proposal in proposals if proposal.forecast.seconds <= SAME_TIME * shortest]
        return min(near, key=lambda proposal: (proposal.plan.depth, -proposal.plan.microbatch_size))

    fastest = simplest(proposals)
    whole = [proposal for proposal in proposals if _is_simplest(proposal.plan, configuration)]
    if configuration.dp_search_all or not whole or fastest in whole:
        return fastest
    chosen = simplest(whole)
    log.info(
        "the model fits, so it gets one stage; %d stages would take %s instead of %s (dp_search_all=True "
        "chooses them)",
        fastest.plan.depth,
        duration(fastest.forecast.seconds),
        duration(chosen.forecast.seconds),
    )
    return msgspec.structs.replace(chosen, reason="the model fits: one stage")


def _is_simplest(plan: Plan, configuration: Configuration) -> bool:
    """Return whether a plan has one stage, and recomputes only if `checkpointing` says so."""
    return plan.depth == 1 and (bool(configuration.checkpointing) or not plan.stages[0].recompute)


def _runners_up(proposals: Sequence[Proposal], best: Proposal) -> tuple[Proposal, ...]:
    """Return the fastest other plan of each depth, with the reason why it lost."""
    others: dict[int, Proposal] = {}
    for proposal in sorted(proposals, key=lambda proposal: proposal.forecast.seconds):
        if proposal.plan != best.plan:
            as_fast = proposal.forecast.seconds <= best.forecast.seconds
            why = "as fast, but less simple" if as_fast else why_slower(proposal.forecast, best.forecast)
            others.setdefault(proposal.plan.depth, msgspec.structs.replace(proposal, reason=why))
    return tuple(others.values())


def _forced_plan(
    task: DeploymentTask, configuration: Configuration, stage_map: StageMap, costs: DeploymentCosts
) -> PinnedPlan:
    """Return the plan of a forced layout, whatever it costs."""
    widths = [len(ranks) for ranks in stage_map]
    plan = Plan(
        stages=plan_stages(
            stage_map,
            task.captured,
            balanced_spans(widths, task.captured) if len(set(widths)) > 1 else None,
            bool(configuration.checkpointing),
            from_cache=False,
        ),
        batch_size=task.batch_size,
        microbatch_size=next(microbatch_sizes(task, configuration, min(widths))),
        schedule=SCHEDULE,
        precision=task.source.precision,
        fingerprint=task.captured.graph.fingerprint,
    )
    forecast, _ = forecast_plan(costs.profile, costs.cluster, plan)
    return PinnedPlan(plan, forecast, (), "as forced")


def load(file: str | os.PathLike[str], task: DeploymentTask) -> PinnedPlan:
    """Load a deployment; raise PlanError if model, number of ranks or precision differ."""
    pinned = read_plan(file)
    plan = pinned.plan
    for what, found, expected in (
        ("another model, with the fingerprint", plan.fingerprint[:16], task.captured.graph.fingerprint[:16]),
        ("another number of ranks:", len(plan.ranks), task.world),
        ("another precision:", plan.precision, task.source.precision),
    ):
        if found != expected:
            raise PlanError(
                f"the deployment {os.fspath(file)} is for {what} {found}, expected {expected} (start without "
                "load_deployment, and save a new deployment)"
            )
    return pinned
