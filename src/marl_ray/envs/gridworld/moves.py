"""The rules and views of the gridworlds, compiled: for one copy and for many at once.

State is the package's own: `grid` (width, height, 3) and `agents` (agents, `AgentState.dim`), int64; with a leading
copy dimension they are `grids` and `states`. All compiled code stands in this one file, because numba's cache on disk
notices a change only in the file that it compiles.
"""

import os
from typing import NamedTuple

import numba
import numpy as np

os.environ.setdefault("PYGAME_HIDE_SUPPORT_PROMPT", "1")  # pygame, which multigrid imports, greets on standard output

from multigrid.core.actions import Action
from multigrid.core.agent import AgentState
from multigrid.core.constants import Direction, State, Type
from multigrid.core.world_object import Wall
from multigrid.utils.obs import get_vis_mask

# Plain integers: comparing with the package's enums costs more than the moves themselves.
LEFT, RIGHT, FORWARD, PICKUP, DROP, TOGGLE, DONE = map(int, Action)
DIR = AgentState.DIR
X = AgentState.POS.start
Y = AgentState.POS.start + 1
TERMINATED = AgentState.TERMINATED
CARRYING = AgentState.CARRYING.start
EMPTY, FLOOR, DOOR, GOAL, LAVA = map(int, (Type.empty, Type.floor, Type.door, Type.goal, Type.lava))
KEY, BALL, BOX = map(int, (Type.key, Type.ball, Type.box))
OPEN_STATE = int(State.open)
STEP_OF_DIRECTION = tuple(tuple(direction.to_vec().tolist()) for direction in Direction)
WALL = tuple(map(int, Wall()))

DRAWN_STEPS = 32
"""Steps whose action order is drawn at once."""


class WorldRules(NamedTuple):
    """The choices of an environment's keyword arguments."""

    overlap: bool
    """Agents may share a cell."""
    joint: bool
    """A success rewards every agent."""
    success_all: bool
    """A success ends only the agent's own episode, not every agent's."""
    failure_all: bool
    """A failure ends only the agent's own episode, not every agent's."""


class Prices(NamedTuple):
    """Costs: of a forward move that moved nobody, and of any action but done."""

    collision: float
    action: float


@numba.njit(cache=True)
def uses_object(grid: np.ndarray, agents: np.ndarray, i: int, action: int) -> bool:
    """Return True if only the package's objects can tell the effect of the action.

    Then an object is taken, dropped or toggled, an open door is entered (RedBlueDoors closes a door without saying so in
    the grid), or the number is no action at all.
    """
    if action in (LEFT, RIGHT, DONE):
        return False
    if action == DROP:
        return bool(agents[i, CARRYING] != EMPTY)
    dx, dy = STEP_OF_DIRECTION[agents[i, DIR]]
    x, y = agents[i, X] + dx, agents[i, Y] + dy
    if not (0 <= x < grid.shape[0] and 0 <= y < grid.shape[1]):
        return True
    kind = grid[x, y, 0]
    if action == FORWARD:
        return bool(kind == DOOR and grid[x, y, 2] == OPEN_STATE)
    if action == PICKUP:
        return agents[i, CARRYING] == EMPTY and kind in (KEY, BALL, BOX)
    if action == TOGGLE:
        return kind in (DOOR, BOX)
    return True


@numba.njit(cache=True)
def enter_cell(
    grid: np.ndarray, agents: np.ndarray, i: int, rules: WorldRules, reward: float, rewards: np.ndarray
) -> None:
    """Move agent i to the cell before it, which does not bar it, unless another agent does.

    A success puts `reward` into `rewards` (agents,).
    """
    dx, dy = STEP_OF_DIRECTION[agents[i, DIR]]
    x, y = agents[i, X] + dx, agents[i, Y] + dy
    if not rules.overlap:
        for other in range(len(agents)):  # finished ones included
            if agents[other, X] == x and agents[other, Y] == y:
                return
    agents[i, X], agents[i, Y] = x, y
    kind = grid[x, y, 0]
    if kind == GOAL:
        for a in range(len(agents)):
            if a == i or not rules.success_all:
                agents[a, TERMINATED] = 1
            if a == i or rules.joint:
                rewards[a] = reward
    elif kind == LAVA:
        for a in range(len(agents)):
            if a == i or not rules.failure_all:
                agents[a, TERMINATED] = 1


@numba.njit(cache=True)
def move(
    grid: np.ndarray, agents: np.ndarray, i: int, action: int, rules: WorldRules, reward: float, rewards: np.ndarray
) -> bool:
    """Let agent i act. False, and nothing happens, if the action needs the package's objects."""
    if agents[i, TERMINATED]:
        return True
    if uses_object(grid, agents, i, action):
        return False
    if action == LEFT:
        agents[i, DIR] = (agents[i, DIR] + 3) % 4
    elif action == RIGHT:
        agents[i, DIR] = (agents[i, DIR] + 1) % 4
    elif action == FORWARD:
        dx, dy = STEP_OF_DIRECTION[agents[i, DIR]]
        if grid[agents[i, X] + dx, agents[i, Y] + dy, 0] in (EMPTY, FLOOR, GOAL, LAVA):
            enter_cell(grid, agents, i, rules, reward, rewards)
    return True


@numba.njit(cache=True)
def move_all(
    grid: np.ndarray,
    agents: np.ndarray,
    actions: np.ndarray,
    draws: np.ndarray,
    rules: WorldRules,
    reward: float,
    rewards: np.ndarray,
) -> bool:
    """Let all agents act, in the order of their draws (agents,).

    Returns False, and changes nothing, if any needs objects. Whether one does can be said beforehand: nothing but the
    use of an object changes the grid, and no agent but itself moves or turns an agent.
    """
    count = len(agents)
    for i in range(count):
        if not agents[i, TERMINATED] and uses_object(grid, agents, i, actions[i]):
            return False
    order = np.empty(count, np.int64)
    for i in range(count):
        before = 0
        for other in range(count):
            before += draws[other] < draws[i] or (draws[other] == draws[i] and other < i)
        order[before] = i
    for rank in range(count):
        move(grid, agents, order[rank], actions[order[rank]], rules, reward, rewards)
    return True


@numba.njit(cache=True)
def price_action(before: np.ndarray, agents: np.ndarray, i: int, action: int, prices: Prices) -> float:
    """Return the cost of agent i's action; `before` (agents, 2) are the positions before the step."""
    cost = prices.action if action != DONE else 0.0
    if action == FORWARD and before[i, 0] == agents[i, X] and before[i, 1] == agents[i, Y]:
        cost += prices.collision
    return cost


@numba.njit(cache=True)
def step_copies(
    copies: np.ndarray,
    grids: np.ndarray,
    states: np.ndarray,
    actions: np.ndarray,
    draws: np.ndarray,
    times: np.ndarray,
    alive: np.ndarray,
    observed: np.ndarray,
    ended: np.ndarray,
    rules: WorldRules,
    prices: Prices,
    max_steps: int,
    rewards: np.ndarray,
    costs: np.ndarray,
    terminated: np.ndarray,
    truncated: np.ndarray,
) -> np.ndarray:
    """Play one step of the `copies` that need no objects.

    The others are left alone and returned as True, (copies,). (copies, agents): `actions`; `alive`, `observed` and
    `ended`, which it updates; and the last four, which it writes (zeros before; `costs` has a last dimension of
    signals). `draws` (copies, DRAWN_STEPS, agents) order the actions, `times` (copies,) count the steps. The package's
    classes that add to a step look only at who toggles a door or carries something, so here they would add nothing.
    """
    unplayed = np.zeros(len(copies), np.bool_)
    count = states.shape[1]
    moves, earned = np.empty(count, np.int64), np.empty(count, np.float64)
    before = np.empty((count, 2), np.int64)
    for n, c in enumerate(copies):
        if not alive[c].any():
            continue
        agents = states[c]
        for i in range(count):
            moves[i] = actions[c, i] if alive[c, i] else DONE
            earned[i] = 0.0
            before[i, 0], before[i, 1] = agents[i, X], agents[i, Y]
        time = times[c] + 1
        reward = 1 - 0.9 * (time / max_steps)
        if not move_all(grids[c], agents, moves, draws[c, times[c] % DRAWN_STEPS], rules, reward, earned):
            unplayed[n] = True
            continue
        times[c] = time
        for i in range(count):
            observed[c, i] = alive[c, i]
            ended[c, i] = agents[i, TERMINATED] != 0
            if alive[c, i]:
                rewards[c, i] = earned[i]
                costs[c, i, 0] = price_action(before, agents, i, moves[i], prices)
                terminated[c, i] = ended[c, i]
                truncated[c, i] = not terminated[c, i] and time >= max_steps
                alive[c, i] = not (terminated[c, i] or truncated[c, i])
    return unplayed


@numba.njit(cache=True)
def observe(
    copies: np.ndarray,
    grids: np.ndarray,
    states: np.ndarray,
    observed: np.ndarray,
    ended: np.ndarray,
    missions: np.ndarray,
    members: np.ndarray,
    view: int,
    see_through: bool,
    rows: np.ndarray,
) -> None:
    """Write the rows (copies, members, D) of the agents `members` in `copies`; zeros for those not `observed`.

    Nobody sees those who are `ended` (copies, agents): ended before the observation was made.
    D: cells of the view as the package encodes them, direction, and the mission if there is room for it. In a view the
    agent stands in the middle of the last row and looks along falling row numbers.
    """
    cells = view * view * 3
    middle, last = view // 2, view - 1
    image = np.empty((1, view, view, 3), np.int8)
    for c in copies:
        grid, agents = grids[c], states[c]
        for k, a in enumerate(members):
            if not observed[c, a]:
                rows[c, k] = 0
                continue
            at_x, at_y = agents[a, X], agents[a, Y]
            dx, dy = STEP_OF_DIRECTION[agents[a, DIR]]
            for i in range(view):
                for j in range(view):
                    right, ahead = i - middle, last - j
                    x, y = at_x + ahead * dx - right * dy, at_y + ahead * dy + right * dx
                    if 0 <= x < grid.shape[0] and 0 <= y < grid.shape[1]:
                        for part in range(3):
                            image[0, i, j, part] = grid[x, y, part]
                    else:
                        for part in range(3):
                            image[0, i, j, part] = WALL[part]
            for other in range(len(agents)):
                if not ended[c, other]:
                    x, y = agents[other, X] - at_x, agents[other, Y] - at_y
                    i, j = middle + y * dx - x * dy, last - x * dx - y * dy
                    if 0 <= i < view and 0 <= j < view:
                        for part in range(3):
                            image[0, i, j, part] = agents[other, part]
            for part in range(3):  # an agent sees the object that it carries in its own place
                image[0, middle, last, part] = agents[a, CARRYING + part]
            if not see_through:
                visible = get_vis_mask(image)
                for i in range(view):
                    for j in range(view):
                        if not visible[0, i, j]:
                            image[0, i, j] = 0
            rows[c, k, :cells] = image.reshape(cells)
            rows[c, k, cells] = agents[a, DIR]
            if rows.shape[2] > cells + 1:
                rows[c, k, cells + 1] = missions[c]
