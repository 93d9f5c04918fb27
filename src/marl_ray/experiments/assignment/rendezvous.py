"""Weighted rendezvous hashing assigns each unit to an arm.

Every arm draws u(arm, unit) in (0, 1) from a salted hash, and the arm with the smallest -ln(u) / weight wins. The
draws are exponential variables with rates equal to the weights, so arm a wins with probability w_a / sum(w), exactly.
An arm's score depends on its own weight and name only. Raising one weight therefore moves units only into that arm,
adding an arm moves units only into the new arm, and neither the order of the arms nor any process matters.
(Thaler and Ravishankar 1998 for rendezvous hashing; Schindelhauer and Schomaker 2005 for the logarithmic weights.)

If arms influence each other's units, the unit's cluster is assigned instead of the unit, by the same hash, or the block
of time in which the unit begins (a switchback: Bojinov, Simchi-Levi, Zhao, arXiv 2009.00148). Independent coins per
block, if there are few blocks, may give one arm all the evenings, and day and night differ more than arms do. So blocks
are drawn in groups of as many consecutive ones as there are arms, by stratified uniforms: the blocks of a group get a
random order pi, and block j gets u_j = (pi_j + e_j) / size with e_j uniform. Each u_j is uniform by itself, so an arm's
chance is exactly its share, and this chance is logged. Together the u_j lie in different strata, so with equal weights
every group has every arm once, and with other weights no arm can have a long run of luck. Groups are independent of
each other, which the statistics (`unit_clusters`) rely on.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

BLOCK_START_LENGTH = 17
"""Number of leading characters of a block's name that hold its start time; SQL reads them too."""


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm of one unit."""

    arm: str
    epoch: int
    """The epoch whose weights chose the arm."""
    propensity: float
    """The probability with which they chose it."""


class AssignmentTable:
    """The weights of one epoch, compiled once and never changed; new weights are a new table.

    A holder swaps tables by assigning one reference, which readers see whole: before or after, never in between.
    """

    __slots__ = ("_assignments", "_draws", "_salt", "epoch", "propensities", "weights")

    def __init__(self, weights: Mapping[str, float], salt: str, epoch: int):
        """Prepare the draws of an epoch by `weights`, arm -> relative weight.

        Raises ValueError unless all weights are finite and not negative, and one of them is positive.
        """
        total = math.fsum(weights.values())
        if not all(0 <= weight < math.inf for weight in weights.values()) or not 0 < total < math.inf:
            raise ValueError(f"weights must be finite, not negative and not all zero, got {dict(weights)}")
        self.epoch = epoch
        self._salt = salt
        self.weights = dict(weights)
        self.propensities = {arm: weight / total for arm, weight in weights.items()}
        live = [arm for arm, weight in weights.items() if weight > 0]
        # Hash state after the prefix, so that a unit costs one copy and one update per arm.
        self._draws = [(arm, arm_prefix(salt, arm), self.weights[arm]) for arm in live]
        self._assignments = {arm: Assignment(arm, epoch, self.propensities[arm]) for arm in live}

    def assign(self, unit: str) -> Assignment:
        """Return the unit's arm.

        The arm is the same for the same salt, weights and unit in every process and on every machine.
        """
        key = unit.encode()
        best, winner = math.inf, ""
        for arm, prefix, weight in self._draws:
            score = -math.log(uniform_of_key(prefix, key)) / weight
            if score < best or not winner:
                best, winner = score, arm
        return self._assignments[winner]

    def assign_block(self, block: str) -> Assignment:
        """Return the arm of a block that `block_of` named, balanced within groups of consecutive blocks."""
        group, place = block_group(block, len(self.weights))
        order = _block_prefix(self._salt, f"order {group}")
        draws = [uniform_of_key(order, str(k).encode()) for k in range(len(self.weights))]
        rank = sum(other < draws[place] for other in draws)
        u = (rank + uniform_of_key(_block_prefix(self._salt, "place"), block.encode())) / len(draws)
        live = sorted(self._assignments)
        for arm in live[:-1]:
            u -= self.propensities[arm]
            if u <= 0:
                return self._assignments[arm]
        return self._assignments[live[-1]]


class PastTables:
    """All weights that an experiment has had under one salt.

    A unit to which each of them gives the same arm has that arm, whenever it came, and nobody needs to look it up.
    """

    __slots__ = ("_draws", "_weights")

    def __init__(self, tables: Iterable[Mapping[str, float]], salt: str):
        """Prepare the tables, each arm -> relative weight as in `AssignmentTable`; those with the same shares are one."""
        shares: dict[tuple[tuple[str, float], ...], None] = {}
        for weights in tables:
            total = math.fsum(weights.values())
            shares[tuple(sorted((arm, weight / total) for arm, weight in weights.items() if weight > 0))] = None
        self._weights = tuple(shares)
        self._draws = {arm: arm_prefix(salt, arm) for weights in self._weights for arm, _ in weights}

    def __len__(self) -> int:
        """Return the number of distinct tables."""
        return len(self._weights)

    def agree(self, unit: str) -> bool:
        """Return True if every table gives the unit the same arm."""
        if len(self._weights) < 2:
            return True
        key = unit.encode()
        draws = {arm: -math.log(uniform_of_key(prefix, key)) for arm, prefix in self._draws.items()}
        winners = {min(weights, key=lambda share: draws[share[0]] / share[1])[0] for weights in self._weights}
        return len(winners) == 1


def draw_arm(
    table: AssignmentTable, randomize: str, unit: str, *, cluster: str | None = None, at: float, block_s: float
) -> tuple[Assignment, str | None]:
    """Assign an arm to a unit that has none yet, and return it with the cluster or block that was drawn.

    `randomize` and `block_s` are the config's; `cluster` is the request's; `at` is now, in seconds since 1970. A unit
    keeps the arm of its first exposure, whatever its later block or cluster. The second value is `Exposure.cluster`; None
    where the unit itself was drawn. Raises ValueError if `randomize` needs a cluster and it is None.
    """
    if randomize == "switchback":
        block = block_of(at, block_s)
        return table.assign_block(block), block
    if randomize == "cluster":
        if cluster is None:
            raise ValueError("cluster: expected the unit's cluster")
        return table.assign(cluster), cluster
    return table.assign(unit), None


def block_of(at: float, block_s: float) -> str:
    """Return the name of the block that contains the moment `at`: its start and its length.

    `at` is in seconds since 1970; a block lasts `block_s` seconds.
    """
    return f"{math.floor(at / block_s) * block_s:0{BLOCK_START_LENGTH}.6f}+{float(block_s)!r}"


def block_span(block: str) -> tuple[float, float]:
    """Return the start (seconds since 1970) and the length (seconds) of a block that `block_of` named."""
    return float(block[:BLOCK_START_LENGTH]), float(block[BLOCK_START_LENGTH:])


def block_group(block: str, size: int) -> tuple[int, int]:
    """Return the index of the group that contains the block, and the block's place in that group.

    A group is `size` consecutive blocks.
    """
    start, length = block_span(block)
    return divmod(round(start / length), size)


def staged_weights(weights: Mapping[str, float], control: str, share: float) -> dict[str, float]:
    """Return the weights that give the treatments `share` of the units together, and the control the rest.

    The share is split in proportion to the treatments' `weights`. Treatments that all weigh nothing leave everything to the
    control. A larger share moves units only from the control into a treatment: the treatments' weights keep their ratios, so
    among themselves each unit prefers the same one as before. Raises ValueError if `share` is not in [0, 1].
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    total = math.fsum(weight for arm, weight in weights.items() if arm != control)
    if total == 0:
        share = 0.0
    return {arm: 1 - share if arm == control else share and share * (weight / total) for arm, weight in weights.items()}


def is_in_layer(layer: str, share: tuple[float, float], unit: str) -> bool:
    """Return True if the unit's place in the layer, uniform in [0, 1), lies in [low, high).

    Experiments of one layer with disjoint shares never have a unit in common; places in two layers are independent of
    each other and of every assignment.
    """
    return share[0] <= _place(b"layer", layer, unit) < share[1]


def is_in_share(salt: str, share: float, unit: str) -> bool:
    """Return True if the unit is in the experiment's share (0 to 1) of all units.

    A larger share only adds units; places are independent of layers, hold-outs and arms, and of other salts.
    """
    return _place(b"population", salt, unit) < share


def is_held_out_unit(endpoint: str, share: float, unit: str) -> bool:
    """Return True if the unit is in the endpoint's hold-out of this share (0 to 1).

    The answer does not depend on the experiments that the endpoint has. A larger share only adds units; places are
    independent of everything else.
    """
    return _place(b"holdout", endpoint, unit) < share


def _place(kind: bytes, name: str, unit: str) -> float:
    """Return the unit's place, uniform in [0, 1)."""
    state = hashlib.blake2b(json.dumps(name).encode(), digest_size=8, person=kind)
    state.update(unit.encode())
    # 53 bits, so that the float is exact and never 1.
    return (int.from_bytes(state.digest(), "big") >> 11) * 2.0**-53


def arm_prefix(salt: str, arm: str) -> "hashlib.blake2b":
    """Return the hash of an experiment's salt and an arm, which `uniform_of_key` continues from with a unit."""
    # JSON marks its own end, so no two (salt, arm, unit) become the same bytes.
    return hashlib.blake2b(json.dumps([salt, arm]).encode(), digest_size=8)


def _block_prefix(salt: str, what: str) -> "hashlib.blake2b":
    return hashlib.blake2b(json.dumps([salt, what]).encode(), digest_size=8, person=b"block")


def uniform_of_key(prefix: "hashlib.blake2b", key: bytes) -> float:
    """Return a number in (0, 1), uniform over keys, that depends on the prefix and the key alone."""
    state = prefix.copy()
    state.update(key)
    # The half keeps out zero, which has no logarithm.
    return (int.from_bytes(state.digest(), "big") + 0.5) * 2.0**-64
