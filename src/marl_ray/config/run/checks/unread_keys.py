"""Hyper-parameters that no algorithm of a run reads are refused here, and left out of a sweep's trials.

`check` refuses them. A sweep calls the other functions, which work on plain data before validation.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from marl_ray.config.run.algorithms import AlgorithmSpec, spec_of
from marl_ray.config.run.keys import RunKeys
from marl_ray.errors import MarlRayError, did_you_mean
from marl_ray.json_types import JsonMapping, JsonObject

DEFAULT_ALGORITHM: str = RunKeys.model_fields["algorithm"].default


def check(config: RunKeys) -> None:
    """Raise ValueError if a hyper-parameter of the run or of a policy is read by no algorithm that could."""
    for key in config.hyper.as_given():
        _check_key(
            f"hyper.{key}", key, {config.algorithm_of(name): config.spec_of(name) for name in config.trained_policies}
        )
    for name, policy in config.team.items():
        for key in policy.hyper:
            if policy.frozen:
                raise ValueError(f"team.{name}.hyper.{key}: a frozen policy has no hyper-parameters")
            _check_key(f"team.{name}.hyper.{key}", key, {config.algorithm_of(name): config.spec_of(name)})


def is_hyper(key: str) -> bool:
    """Return True if a dotted key of a run config is a hyper-parameter, `hyper.NAME` or `team.POLICY.hyper.NAME`."""
    return _split_key(key) is not None


def names_algorithm(key: str) -> bool:
    """Return True if a dotted key of a run config can change a policy's algorithm."""
    parts = key.split(".")
    return parts == ["algorithm"] or (parts[0] == "team" and (len(parts) < 3 or parts[2:] == ["algorithm"]))


def is_read(key: str, data: JsonMapping) -> bool:
    """Return True if an algorithm of the run config `data` reads the hyper-parameter of this dotted key.

    A key of the run is read if the algorithm of one trained policy reads it; a policy's own key, if that policy's does.
    A key that is wrong for another reason (an algorithm that does not exist, a frozen policy) counts as read, so that
    `RunConfig` refuses it for that reason.
    """
    parts = _split_key(key)
    if parts is None:
        return True
    policy, hyper_key = parts
    team = data.get("team")
    team = team if isinstance(team, Mapping) and team else {"shared": {}}
    members = [member for name, member in team.items() if policy in (None, name) and isinstance(member, Mapping)]
    trained = [member for member in members if not member.get("frozen")]
    algorithms = [member.get("algorithm") or data.get("algorithm", DEFAULT_ALGORITHM) for member in trained]
    return not algorithms or any(_is_read_by(algorithm, hyper_key) for algorithm in algorithms)


def hyper_keys(data: JsonMapping) -> list[str]:
    """Return the dotted keys of all hyper-parameters that the run config `data` gives."""
    return [f"{where}.{key}" for where, hyper in _hyper_groups(data) for key in hyper]


def drop_unread(data: JsonObject) -> None:
    """Remove the hyper-parameters that no algorithm reads from the run config `data`."""
    unread = {key for key in hyper_keys(data) if not is_read(key, data)}
    for where, hyper in _hyper_groups(data):
        for key in [key for key in hyper if f"{where}.{key}" in unread]:
            del hyper[key]


def _hyper_groups(data: JsonMapping) -> Iterator[tuple[str, Any]]:
    """Yield the run's `hyper` and each policy's, with their dotted keys."""
    if isinstance(data.get("hyper"), Mapping):
        yield "hyper", data["hyper"]
    team = data.get("team")
    for name, member in team.items() if isinstance(team, Mapping) else ():
        if isinstance(member, Mapping) and isinstance(member.get("hyper"), Mapping):
            yield f"team.{name}.hyper", member["hyper"]


def _split_key(key: str) -> tuple[str | None, str] | None:
    """Return the policy and the name of a hyper-parameter by its dotted key; None if it is none.

    The policy is None where the key is of the whole run.
    """
    parts = key.split(".")
    if parts[0] == "hyper" and len(parts) > 1:
        return None, parts[1]
    if parts[0] == "team" and parts[2:3] == ["hyper"] and len(parts) > 3:
        return parts[1], parts[3]
    return None


def _is_read_by(algorithm: Any, key: str) -> bool:
    try:
        return key in spec_of(algorithm).read_keys
    except (MarlRayError, TypeError, AttributeError):  # no algorithm, or no text at all
        return True


def _check_key(where: str, key: str, specs: Mapping[str, AlgorithmSpec]) -> None:
    """Raise ValueError unless an algorithm of `specs`, which are by name, reads the hyper-parameter `key`.

    `where` is its dotted key in the config.
    """
    if any(key in spec.read_keys for spec in specs.values()):
        return
    if not any(key in spec.hyper.model_fields for spec in specs.values()):
        readable = sorted({name for spec in specs.values() for name in spec.read_keys})
        raise ValueError(f"unknown key {where!r}{did_you_mean(key, readable, before=where.removesuffix(key))}")
    names, commands = " and ".join(specs), "` and `marl-ray algorithms ".join(specs)
    raise ValueError(
        f"{where}: {names} {'does' if len(specs) == 1 else 'do'} not read it; see what is read with "
        f"`marl-ray algorithms {commands}`"
    )
