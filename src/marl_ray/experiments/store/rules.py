"""Checks of an opened or changed experiment against the database's other rows."""

from collections.abc import Mapping
from typing import Any

import sqlalchemy as sa

from marl_ray.errors import MarlRayError
from marl_ray.experiments.database import schema
from marl_ray.experiments.lifecycle import OPEN_STATUSES, ExperimentRecord, plan_of
from marl_ray.experiments.store.records import look_settings
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS


class RolledBackElsewhereError(MarlRayError):
    """An arm would get traffic with weights that another experiment has rolled back."""


def check_settings_kept(connection: sa.Connection, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise MarlRayError if a change of `randomize` or of the window would concern units that are already there."""
    before, after = look_settings(old), look_settings(new)
    # In a config older than windows nobody could choose one, and everything that came before counts under any.
    has_window = "outcome_window_s" in old
    changed = [
        (key, expected, value, what)
        for key, expected, value, what in (
            ("randomize", before.randomize, after.randomize, "by which its sessions were assigned"),
            ("outcome_window_s", before.window_s, after.window_s, "by which its sessions are judged"),
        )
        if expected != value and (has_window or key != "outcome_window_s")
    ]
    exposed = schema.exposures.c
    any_of_them = sa.select(exposed.unit).where(exposed.experiment == name).limit(1)
    if changed and connection.execute(any_of_them).first() is not None:
        key, expected, value, what = changed[0]
        raise MarlRayError(
            f"experiment {name!r}: {key}: expected {expected!r}, {what}, got {value!r}; start an experiment with a new name"
        )


def check_arms_kept(connection: sa.Connection, name: str, old: dict[str, Any], new: dict[str, Any]) -> None:
    """Raise MarlRayError if an arm that has units is missing or has another bundle."""
    exposed = schema.exposures.c
    for arm, before in old.items():
        if arm in new and new[arm]["digest"] == before["digest"]:
            continue
        any_unit = sa.select(exposed.unit).where(exposed.experiment == name, exposed.arm == arm).limit(1)
        if connection.execute(any_unit).first() is None:
            continue
        what = "another bundle" if arm in new else "no such arm"
        raise MarlRayError(
            f"experiment {name!r}: arm {arm!r} already has sessions with bundle {before['digest'][:DIGEST_DIGITS]}, "
            f"the config has {what}; set its weight to 0, or start an experiment with a new name"
        )


def check_endpoint(connection: sa.Connection, record: ExperimentRecord, endpoint: str) -> None:
    """Raise MarlRayError if another open experiment uses the endpoint and shares no layer with this one."""
    if record.state.status not in OPEN_STATUSES:
        return
    experiments = schema.experiments.c
    others = sa.select(experiments.name, experiments.status, experiments.config).where(
        experiments.endpoint == endpoint, experiments.status.in_(OPEN_STATUSES)
    )
    layer, (low, high) = record.config.get("layer"), record.config.get("layer_share", (0.0, 1.0))
    for row in connection.execute(
        others.where(experiments.name != record.name).order_by(experiments.created, experiments.name)
    ):
        other_low, other_high = row.config.get("layer_share", (0.0, 1.0))
        if layer is not None and layer == row.config.get("layer") and (high <= other_low or other_high <= low):
            continue
        raise MarlRayError(
            f"experiment {record.name!r}: endpoint {endpoint!r} still has experiment {row.name!r} ({row.status}); "
            "promote, roll back or stop that one first, or give both the same layer and disjoint layer_share"
        )


def marked_arms(connection: sa.Connection, name: str) -> frozenset[str]:
    """Return the experiment's rolled-back arms."""
    arms = schema.arms.c
    marked = sa.select(arms.arm).where(arms.experiment == name, arms.rolled_back_at.is_not(None))
    return frozenset(connection.execute(marked).scalars())


def allowed_arms(
    connection: sa.Connection,
    name: str,
    config: dict[str, Any],
    before: dict[str, Any],
    weights: Mapping[str, float] | None = None,
) -> dict[str, str]:
    """Return the arms whose weights another experiment has rolled back: arm -> that experiment.

    The arms serve these weights with the config's permission: the arms have weight in the config, or in the `weights` that
    an action gives them, and their bundle, or the same weights in another bundle, were rolled back elsewhere. Arms that
    `before` (the arms of the earlier config) already permitted are left out. Raises RolledBackElsewhereError for such an
    arm without `allow_rolled_back`.
    """
    own_alias, other_alias = schema.arms.alias(), schema.arms.alias()
    own_arms, other_arms, same = own_alias.c, other_alias.c, _have_same_weights(own_alias, other_alias)
    marked = sa.and_(same, other_arms.experiment != name, other_arms.rolled_back_at.is_not(None))
    query = sa.select(
        own_arms.arm, own_arms.digest, sa.func.min(other_arms.experiment).label("other_experiment")
    ).where(marked)
    query = query.where(own_arms.experiment == name, own_arms.rolled_back_at.is_(None)).group_by(
        own_arms.arm, own_arms.digest
    )
    allowed: dict[str, str] = {}
    for row in connection.execute(query):
        part, earlier = config["arms"].get(row.arm), before.get(row.arm, {})
        same_bundle = earlier.get("digest") == row.digest
        # An experiment that runs needs its control, wherever that may have failed as a treatment.
        serves = part is not None and (part["weight"] > 0 or (weights or {}).get(row.arm, 0.0) > 0)
        if not serves or (same_bundle and row.arm == plan_of(config).control):
            continue
        if not part.get("allow_rolled_back", False):
            raise RolledBackElsewhereError(
                f"experiment {name!r}: arms.{row.arm}: the weights of bundle {row.digest[:DIGEST_DIGITS]} have been rolled "
                f"back in experiment {row.other_experiment!r}; expected another bundle, weight 0, or "
                "allow_rolled_back: true (marl-ray deploy --allow-rolled-back)"
            )
        if not (same_bundle and earlier.get("allow_rolled_back", False)):
            allowed[row.arm] = row.other_experiment
    return allowed


def twin_treatments(connection: sa.Connection, record: ExperimentRecord, arm: str | None) -> frozenset[str]:
    """Return the other treatments of the experiment whose bundle or weights are those of the arm; none without an arm."""
    arms, twins = schema.arms.alias(), schema.arms.alias()
    same = sa.and_(arms.c.experiment == twins.c.experiment, _have_same_weights(arms, twins), twins.c.arm != arm)
    query = sa.select(twins.c.arm).where(arms.c.experiment == record.name, arms.c.arm == arm, same)
    return frozenset(connection.execute(query).scalars()) & frozenset(record.plan.treatments)


def _have_same_weights(arms: sa.FromClause, others: sa.FromClause) -> sa.ColumnElement[bool]:
    """Return the condition that rows of two aliases of the table of arms are of one bundle, or of the same weights."""
    return sa.or_(arms.c.digest == others.c.digest, arms.c.weights_sha256 == others.c.weights_sha256)


def barred_reason(connection: sa.Connection, record: ExperimentRecord) -> str | None:
    """Return why no arm of the experiment may get more traffic, as a sentence; None if each may.

    The reason is that another experiment has rolled an arm's weights back.
    """
    try:
        allowed_arms(connection, record.name, record.config, record.config["arms"])
    except RolledBackElsewhereError as error:
        return str(error)
    return None
