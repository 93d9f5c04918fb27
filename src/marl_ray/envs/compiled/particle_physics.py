"""The physics, rewards and views of three particle worlds of mpe2 (Lowe et al. 2017, arXiv 1706.02275), compiled.

A world's state is one row of float64: positions (entities, 2), velocities (agents, 2), the words that were said (agents,
words), the agents' goals (agents,) and the number of steps. Entities are the agents, then the landmarks. Sums are in the
order in which mpe2 takes them, so that results agree to the last bit. All compiled code stands in this one file, because
numba's cache on disk notices a change only in the file that it compiles.
"""

import math
from typing import NamedTuple

import numba
import numpy as np

SPREAD, TAG, REFERENCE = 0, 1, 2
"""Numbers of the three worlds: compiled code compares no texts."""
# Constants of mpe2's `World` (mpe2/_mpe_utils/core.py), and of the success of `simple_spread_v3`; they have no units.
TIME_STEP = 0.1
DAMPING = 0.25
CONTACT_FORCE = 1e2
CONTACT_MARGIN = 1e-3
CAPTURE_RADIUS = 0.1
COLORS = np.array([[0.75, 0.25, 0.25], [0.25, 0.75, 0.25], [0.25, 0.25, 0.75]])


class Rules(NamedTuple):
    """The constants of a world."""

    kind: int
    """SPREAD, TAG or REFERENCE."""
    agents: int
    landmarks: int
    chasers: int
    """Agents from the first on that chase the others, in TAG."""
    words: int
    """Size of a said word's one-hot code; silent agents have zeros there."""
    local_ratio: float
    """Share of an agent's own reward; 1 where there is no common one."""
    max_cycles: int
    ends_on_success: bool
    sizes: np.ndarray
    """(entities,) radii."""
    collides: np.ndarray
    """(entities,) bool."""
    force: np.ndarray
    """(agents,) force of a move."""
    speed: np.ndarray
    """(agents,) greatest speed."""


@numba.njit(cache=True, nogil=True)
def split_state(state: np.ndarray, rules: Rules) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Return the views of a state: positions, velocities, words, goals."""
    entities, a, b = rules.agents + rules.landmarks, 0, 0
    b = 2 * entities
    places = state[:b].reshape(entities, 2)
    a, b = b, b + 2 * rules.agents
    velocities = state[a:b].reshape(rules.agents, 2)
    a, b = b, b + rules.words * rules.agents
    words = state[a:b].reshape(rules.agents, rules.words)
    return places, velocities, words, state[b : b + rules.agents]


@numba.njit(cache=True, nogil=True)
def distance(a: np.ndarray, b: np.ndarray) -> float:
    """Return the distance of two places, (2,) each."""
    return math.sqrt((a[0] - b[0]) ** 2 + (a[1] - b[1]) ** 2)


@numba.njit(cache=True, nogil=True)
def overlap(places: np.ndarray, i: int, j: int, rules: Rules) -> bool:
    """Return True if the entities `i` and `j` overlap; `places` is (entities, 2)."""
    near: bool = distance(places[i], places[j]) < rules.sizes[i] + rules.sizes[j]
    return near


@numba.njit(cache=True, nogil=True)
def move_agents(places: np.ndarray, velocities: np.ndarray, actions: np.ndarray, rules: Rules) -> None:
    """Add up the forces of the actions and of contacts, then move the agents."""
    agents, entities = rules.agents, len(places)
    forces = np.zeros((entities, 2))
    for i in range(agents):
        choice = actions[i] % 5
        if choice > 0:
            forces[i, (choice - 1) // 2] = rules.force[i] if choice % 2 == 0 else -rules.force[i]
    for i in range(agents):
        for j in range(i + 1, entities):
            if not (rules.collides[i] and rules.collides[j]):
                continue
            gap = distance(places[i], places[j])
            depth = -(gap - (rules.sizes[i] + rules.sizes[j])) / CONTACT_MARGIN
            soft = math.log1p(math.exp(depth)) if depth < 0 else depth + math.log1p(math.exp(-depth))
            for d in range(2):
                push = CONTACT_FORCE * (places[i, d] - places[j, d]) / gap * (soft * CONTACT_MARGIN)
                forces[i, d] = push + forces[i, d]
                if j < agents:
                    forces[j, d] = -push + forces[j, d]
    for i in range(agents):
        for d in range(2):
            places[i, d] += velocities[i, d] * TIME_STEP
            velocities[i, d] = velocities[i, d] * (1 - DAMPING)
            velocities[i, d] += forces[i, d] * TIME_STEP
        speed = math.sqrt(velocities[i, 0] ** 2 + velocities[i, 1] ** 2)
        if speed > rules.speed[i]:
            for d in range(2):
                velocities[i, d] = velocities[i, d] / speed * rules.speed[i]


@numba.njit(cache=True, nogil=True)
def nearest(places: np.ndarray, landmark: int, rules: Rules) -> float:
    """Return the distance of a landmark from the agent that is nearest to it."""
    least = np.inf
    for i in range(rules.agents):
        least = min(least, distance(places[i], places[rules.agents + landmark]))
    return least


@numba.njit(cache=True, nogil=True)
def own_reward(i: int, places: np.ndarray, goals: np.ndarray, rules: Rules) -> float:
    """Return the reward of agent i alone."""
    reward = 0.0
    if rules.kind == SPREAD:
        for j in range(rules.agents):
            if j != i and overlap(places, i, j, rules):
                reward -= 1.0
    elif rules.kind == TAG and i < rules.chasers:
        for prey in range(rules.chasers, rules.agents):
            for chaser in range(rules.chasers):
                if overlap(places, prey, chaser, rules):
                    reward += 10
    elif rules.kind == TAG:
        for chaser in range(rules.chasers):
            if overlap(places, chaser, i, rules):
                reward -= 10
        for d in range(2):
            x = abs(places[i, d])
            if x >= 1.0:
                reward -= min(math.exp(2 * x - 2), 10.0)
            elif x >= 0.9:
                reward -= (x - 0.9) * 10
    else:
        reward = -distance(places[1 - i], places[rules.agents + int(goals[i])])
    return reward


@numba.njit(cache=True, nogil=True)
def common_reward(places: np.ndarray, goals: np.ndarray, rules: Rules) -> float:
    """Return the reward that all agents share."""
    reward = 0.0
    if rules.kind == SPREAD:
        for landmark in range(rules.landmarks):
            reward -= nearest(places, landmark, rules)
    elif rules.kind == REFERENCE:
        for i in range(rules.agents):
            reward += own_reward(i, places, goals, rules)
        reward /= rules.agents
    return reward


@numba.njit(cache=True, nogil=True)
def has_succeeded(places: np.ndarray, rules: Rules) -> bool:
    """Return True if every landmark is covered, or every prey is caught."""
    if rules.kind == SPREAD:
        far = 0
        for landmark in range(rules.landmarks):
            far += nearest(places, landmark, rules) >= CAPTURE_RADIUS
        return far == 0
    for prey in range(rules.chasers, rules.agents):
        caught = False
        for chaser in range(rules.chasers):
            caught = caught or overlap(places, prey, chaser, rules)
        if not caught:
            return False
    return True


@numba.njit(cache=True, nogil=True)
def step_copies(
    states: np.ndarray,
    alive: np.ndarray,
    actions: np.ndarray,
    rewards: np.ndarray,
    costs: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
    rules: Rules,
) -> None:
    """Step the copies whose agents are alive: all of a copy's agents live equally long. See `arrays.StepCopies`."""
    for c in range(len(states)):
        if not alive[c, 0]:
            continue
        places, velocities, words, goals = split_state(states[c], rules)
        move_agents(places, velocities, actions[c], rules)
        if rules.kind == REFERENCE:
            words[:] = 0.0
            for i in range(rules.agents):
                words[i, actions[c, i] // 5] = 1.0
        common = common_reward(places, goals, rules)
        for i in range(rules.agents):
            local = own_reward(i, places, goals, rules)
            rewards[c, i] = local if rules.kind == TAG else common * (1 - rules.local_ratio) + local * rules.local_ratio
        states[c, -1] += 1
        if states[c, -1] >= rules.max_cycles:
            truncated[c] = True
        elif rules.ends_on_success and has_succeeded(places, rules):
            terminated[c] = True


@numba.njit(cache=True, nogil=True)
def write_pair(values: np.ndarray, i: int, row: np.ndarray, at: int) -> int:
    """Write the two numbers of entity `i` to the places of a row from `at` on, and return the place after them.

    `values` are (entities, 2). As slices they would take ten times as long.
    """
    row[at], row[at + 1] = values[i, 0], values[i, 1]
    return at + 2


@numba.njit(cache=True, nogil=True)
def write_relative_position(places: np.ndarray, i: int, j: int, row: np.ndarray, at: int) -> int:
    """Write where entity `j` is, seen from agent `i`, to a row from `at` on, and return the place after it."""
    row[at], row[at + 1] = places[j, 0] - places[i, 0], places[j, 1] - places[i, 1]
    return at + 2


@numba.njit(cache=True, nogil=True)
def observe(states: np.ndarray, copies: np.ndarray, agents: np.ndarray, rows: np.ndarray, rules: Rules) -> None:
    """Write observations, as mpe2 orders them. See `arrays.ObserveRows`."""
    for c in copies:
        places, velocities, words, goals = split_state(states[c], rules)
        for k in range(len(agents)):
            i, row, at = agents[k], rows[c, k], 0
            at = write_pair(velocities, i, row, at)
            if rules.kind != REFERENCE:
                at = write_pair(places, i, row, at)
            for j in range(rules.agents, len(places)):
                at = write_relative_position(places, i, j, row, at)
            if rules.kind == REFERENCE:
                row[at : at + 3] = COLORS[int(goals[i])]
                row[at + 3 :] = words[1 - i]
                continue
            for j in range(rules.agents):
                if j != i:
                    at = write_relative_position(places, i, j, row, at)
            if rules.kind == TAG:
                for j in range(rules.chasers, rules.agents):
                    if j != i:
                        at = write_pair(velocities, j, row, at)
            else:
                row[at:] = 0.0  # the words of the others, who are silent
