"""What the database's other rows forbid an experiment that is opened or changed."""

from typing import Any

import sqlalchemy as sa

from marl_ray.errors import MarlRayError
from marl_ray.experiments.lifecycle import ExperimentRecord, plan_of
from marl_ray.experiments.store import schema
from marl_ray.experiments.store.records import OPEN, look_design


def check_design_kept(connection: sa.Connection, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """MarlRayError if what is assigned, or when it is judged, would change under units that are there."""
    before, after = look_design(old), look_design(new)
    # From before there were windows: all that had come counts under any, and nobody could choose one.
    chosen = "outcome_window_s" in old
    changed = [
        (key, one, other, what)
        for key, one, other, what in (
            ("randomize", before.randomize, after.randomize, "by which its sessions were assigned"),
            ("outcome_window_s", before.window_s, after.window_s, "by which its sessions are judged"),
        )
        if one != other and (chosen or key != "outcome_window_s")
    ]
    exposed = schema.exposures.c
    any_of_them = sa.select(exposed.unit).where(exposed.experiment == name).limit(1)
    if changed and connection.execute(any_of_them).first() is not None:
        key, one, other, what = changed[0]
        raise MarlRayError(
            f"experiment {name!r}: {key}: expected {one!r}, {what}, got {other!r}; start an experiment with a new name"
        )


def check_arms_kept(connection: sa.Connection, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """MarlRayError if an arm that has units would be missing or another bundle."""
    exposed = schema.exposures.c
    for arm, before in old.items():
        if arm in new and new[arm]["digest"] == before["digest"]:
            continue
        one = sa.select(exposed.unit).where(exposed.experiment == name, exposed.arm == arm).limit(1)
        if connection.execute(one).first() is None:
            continue
        what = "another bundle" if arm in new else "no such arm"
        raise MarlRayError(
            f"experiment {name!r}: arm {arm!r} already has sessions with bundle {before['digest'][:16]}, "
            f"the config has {what}; set its weight to 0, or start an experiment with a new name"
        )


def check_endpoint(connection: sa.Connection, record: ExperimentRecord, endpoint: str) -> None:
    """MarlRayError if another open experiment is in the way of this one."""
    if record.state.status not in OPEN:
        return
    here = schema.experiments.c
    others = sa.select(here.name, here.status, here.config).where(here.endpoint == endpoint, here.status.in_(OPEN))
    layer, (low, high) = record.config.get("layer"), record.config.get("layer_share", (0.0, 1.0))
    for row in connection.execute(others.where(here.name != record.name).order_by(here.created, here.name)):
        other_low, other_high = row.config.get("layer_share", (0.0, 1.0))
        if layer is not None and layer == row.config.get("layer") and (high <= other_low or other_high <= low):
            continue
        raise MarlRayError(
            f"experiment {record.name!r}: endpoint {endpoint!r} still has experiment {row.name!r} ({row.status}); "
            "promote, roll back or stop that one first, or give both the same layer and disjoint layer_share"
        )


def marked_arms(connection: sa.Connection, name: str) -> frozenset[str]:
    """The experiment's rolled-back arms."""
    arms = schema.arms.c
    marked = sa.select(arms.arm).where(arms.experiment == name, arms.rolled_back_at.is_not(None))
    return frozenset(connection.execute(marked).scalars())


def allowed_arms(
    connection: sa.Connection, name: str, config: dict[str, Any], before: dict[str, Any]
) -> dict[str, str]:
    """Arm -> another experiment, for the arms with weight whose bundle (or whose weights, in whatever bundle) that one has
    rolled back and which the config allows, unless it did so `before` (the arms of the earlier config). MarlRayError for one
    that is not allowed."""
    mine, other = schema.arms.alias().c, schema.arms.alias().c
    same = sa.or_(other.digest == mine.digest, other.weights_sha256 == mine.weights_sha256)
    marked = sa.and_(same, other.experiment != name, other.rolled_back_at.is_not(None))
    query = sa.select(mine.arm, mine.digest, sa.func.min(other.experiment).label("elsewhere")).where(marked)
    query = query.where(mine.experiment == name, mine.rolled_back_at.is_(None)).group_by(mine.arm, mine.digest)
    allowed: dict[str, str] = {}
    for row in connection.execute(query):
        part, known = config["arms"].get(row.arm), before.get(row.arm, {})
        kept = known.get("digest") == row.digest
        # An experiment that runs needs its control, wherever that may have failed as a treatment.
        if part is None or not part["weight"] > 0 or (kept and row.arm == plan_of(config).control):
            continue
        if not part.get("allow_rolled_back", False):
            raise MarlRayError(
                f"experiment {name!r}: arms.{row.arm}: the weights of bundle {row.digest[:16]} have been rolled back in "
                f"experiment {row.elsewhere!r}; expected another bundle, weight 0, or allow_rolled_back: true"
            )
        if not (kept and known.get("allow_rolled_back", False)):
            allowed[row.arm] = row.elsewhere
    return allowed
