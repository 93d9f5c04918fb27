"""Which arm a unit gets: weighted rendezvous hashing.

Every arm draws u(arm, unit) in (0, 1) from a salted hash, and the arm with the smallest -ln(u) / weight wins. The
draws are exponential variables with rates equal to the weights, so arm a wins with probability w_a / sum(w), exactly.
An arm's score depends on its own weight and name only. Raising one weight therefore moves units only into that arm,
adding an arm moves units only into the new arm, and neither the order of the arms nor any process matters.
(Thaler and Ravishankar 1998 for rendezvous hashing; Schindelhauer and Schomaker 2005 for the logarithmic weights.)
"""

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Assignment:
    """The arm of one unit, and with what probability and under which weights it was chosen."""

    arm: str
    epoch: int
    propensity: float


class AssignmentTable:
    """The weights of one epoch, compiled once and never changed; new weights are a new table.

    A holder swaps tables by assigning one reference, which readers see whole: before or after, never in between.
    """

    __slots__ = ("_draws", "_outcomes", "epoch", "propensities", "weights")

    def __init__(self, weights: Mapping[str, float], salt: str, epoch: int):
        """`weights` (arm -> relative weight) must be finite and not negative, one of them positive, or ValueError."""
        total = math.fsum(weights.values())
        if not all(0 <= weight < math.inf for weight in weights.values()) or not 0 < total < math.inf:
            raise ValueError(f"weights must be finite, not negative and not all zero, got {dict(weights)}")
        self.epoch = epoch
        self.weights = dict(weights)
        self.propensities = {arm: weight / total for arm, weight in weights.items()}
        live = [arm for arm, weight in weights.items() if weight > 0]
        # Hash state after the prefix, so that a unit costs one copy and one update per arm.
        self._draws = [(arm, _prefix(salt, arm), self.weights[arm]) for arm in live]
        self._outcomes = {arm: Assignment(arm, epoch, self.propensities[arm]) for arm in live}

    def assign(self, unit: str) -> Assignment:
        """The unit's arm; the same for the same salt, weights and unit in every process and on every machine."""
        key = unit.encode()
        best, winner = math.inf, ""
        for arm, prefix, weight in self._draws:
            score = -math.log(_uniform(prefix, key)) / weight
            if score < best or not winner:
                best, winner = score, arm
        return self._outcomes[winner]


def staged_weights(weights: Mapping[str, float], control: str, share: float) -> dict[str, float]:
    """Weights that give the treatments `share` (in [0, 1], else ValueError) of the units together, split in proportion
    to their `weights`, and the control the rest. Treatments that all weigh nothing leave everything to the control.

    A larger share moves units only from the control into a treatment: the treatments' weights keep their ratios, so
    among themselves each unit prefers the same one as before.
    """
    if not 0 <= share <= 1:
        raise ValueError(f"share must be in [0, 1], got {share}")
    total = math.fsum(weight for arm, weight in weights.items() if arm != control)
    if total == 0:
        share = 0.0
    return {arm: 1 - share if arm == control else share and share * (weight / total) for arm, weight in weights.items()}


def in_layer(layer: str, share: tuple[float, float], unit: str) -> bool:
    """Whether the unit's place in the layer, uniform in [0, 1), lies in [low, high).

    Experiments of one layer with disjoint shares never have a unit in common; places in two layers are independent of
    each other and of every assignment.
    """
    state = hashlib.blake2b(json.dumps(layer).encode(), digest_size=8, person=b"layer")
    state.update(unit.encode())
    # 53 bits, so that the float is exact and never 1.
    place = (int.from_bytes(state.digest(), "big") >> 11) * 2.0**-53
    return share[0] <= place < share[1]


def unit_hash(salt: str, arm: str, unit: str) -> float:
    """The draw of one arm for one unit: in (0, 1], from 64 bits of blake2b."""
    return _uniform(_prefix(salt, arm), unit.encode())


def _prefix(salt: str, arm: str) -> "hashlib.blake2b":
    # JSON ends where it ends, so no two (salt, arm, unit) run together to the same bytes.
    return hashlib.blake2b(json.dumps([salt, arm]).encode(), digest_size=8)


def _uniform(prefix: "hashlib.blake2b", key: bytes) -> float:
    state = prefix.copy()
    state.update(key)
    # The half keeps zero out: its logarithm does not exist.
    return (int.from_bytes(state.digest(), "big") + 0.5) * 2.0**-64
