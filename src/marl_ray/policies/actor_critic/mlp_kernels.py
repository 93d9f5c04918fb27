"""Small perceptrons compiled by numba on BLAS: acting, and the gradient step of PPO's loss, without torch's dispatch.

A network is one row of float32 weights in the order of `Network.parameters()`, and its `widths` (layers + 1,): those of
the input, the hidden layers and the output. Rows pass in blocks that stay in the processor's cache. All compiled code
stands in this one file, because numba's cache on disk notices a change only in the file that it compiles.
`error_model="numpy"` matters: a check of every divisor for zero would keep the compiler from computing sixteen numbers
at once.
"""

import math

import numba
import numpy as np

from marl_ray.policies.actor_critic.mlp_arguments import DecisionArrays, NetworkShape, PPOTerms

F = np.float32
FAST = {"contract", "nsz", "arcp", "reassoc"}
"""Liberties of the compiler that leave NaN and infinity what they are, because they show a run that diverged."""
BLOCK = 128
"""Rows that pass at once: as many as BLAS multiplies fastest."""
FORBIDDEN = F(-1e9)
LOG_RATIO_LIMIT = 20.0


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)  # type: ignore[untyped-decorator]  # numba has no types
def activate(rows: np.ndarray, bias: np.ndarray, tanh: bool) -> None:
    """Add the bias to (n, width) and apply the activation, in place; tanh as a ratio of polynomials (Eigen's, exact to
    3e-7)."""
    for i in range(len(rows)):
        row = rows[i]
        if tanh:
            for j in range(len(bias)):
                x = row[j] + bias[j]
                x = F(7.9) if x > F(7.9) else x
                x = F(-7.9) if x < F(-7.9) else x
                s = x * x
                p = F(-2.76076847742355e-16) * s + F(2.00018790482477e-13)
                p = p * s + F(-8.60467152213735e-11)
                p = p * s + F(5.12229709037114e-08)
                p = p * s + F(1.48572235717979e-05)
                p = p * s + F(6.37261928875436e-04)
                p = p * s + F(4.89352455891786e-03)
                q = F(1.19825839466702e-06) * s + F(1.18534705686654e-04)
                q = q * s + F(2.26843463243900e-03)
                q = q * s + F(4.89352518554385e-03)
                row[j] = x * p / q
        else:
            for j in range(len(bias)):
                x = row[j] + bias[j]
                row[j] = F(0) if x < F(0) else x


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)  # type: ignore[untyped-decorator]
def standardise(rows: np.ndarray, out: np.ndarray) -> None:
    """Each row (N, D) less its mean, over its spread, as torch's layer norm has it."""
    for i in range(len(rows)):
        mean, square = F(0), F(0)
        for x in rows[i]:
            mean += x
        mean /= F(rows.shape[1])
        for x in rows[i]:
            square += (x - mean) * (x - mean)
        scale = F(1) / F(math.sqrt(square / F(rows.shape[1]) + F(1e-5)))
        for j in range(rows.shape[1]):
            out[i, j] = (rows[i, j] - mean) * scale


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)  # type: ignore[untyped-decorator]
def forward(weights: np.ndarray, net: NetworkShape, inputs: np.ndarray, space: np.ndarray) -> np.ndarray:
    """Outputs (n, out) of rows (n, D), which come normalised if the network has a norm. `space` keeps, one after another,
    the scaled input if there is a norm, and every layer's outputs."""
    n, at, used, hidden = len(inputs), 0, 0, inputs
    if net.norm:
        d = net.widths[0]
        hidden, used, at = space[: n * d].reshape(n, d), n * d, 2 * d
        for i in range(n):
            for j in range(d):
                hidden[i, j] = inputs[i, j] * weights[j] + weights[d + j]
    for layer in range(len(net.widths) - 1):
        a, b = net.widths[layer], net.widths[layer + 1]
        matrix, bias = weights[at : at + a * b].reshape(b, a), weights[at + a * b : at + a * b + b]
        out = space[used : used + n * b].reshape(n, b)
        np.dot(hidden, matrix.T, out)
        if layer + 2 < len(net.widths):
            activate(out, bias, net.tanh)
        else:
            for i in range(n):
                for j in range(b):
                    out[i, j] += bias[j]
        hidden, used, at = out, used + n * b, at + a * b + b
    return hidden


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)  # type: ignore[untyped-decorator]
def backward(
    weights: np.ndarray,
    gradient: np.ndarray,
    net: NetworkShape,
    inputs: np.ndarray,
    space: np.ndarray,
    slope: np.ndarray,
    room: np.ndarray,
) -> None:
    """Add the gradient of the weights to `gradient`, given that of the outputs, `slope` (n, out), and what `forward` left
    in `space`. `room` (3, ...) is memory for the products."""
    n, at, used = len(inputs), net.size, 0
    for width in net.widths[1:]:
        used += n * width
    if net.norm:
        used += n * net.widths[0]
    for layer in range(len(net.widths) - 2, -1, -1):
        a, b = net.widths[layer], net.widths[layer + 1]
        at -= a * b + b
        used -= n * b
        below = inputs
        if layer > 0 or net.norm:
            below = space[used - n * a : used].reshape(n, a)
        product = room[0, : a * b]
        np.dot(slope.T, below, product.reshape(b, a))
        for k in range(a * b):
            gradient[at + k] += product[k]
        bias = gradient[at + a * b : at + a * b + b]
        for i in range(n):
            for j in range(b):
                bias[j] += slope[i, j]
        if layer == 0 and not net.norm:
            break
        lower = room[1 + layer % 2, : n * a].reshape(n, a)
        np.dot(slope, weights[at : at + a * b].reshape(b, a), lower)
        if layer > 0 and net.tanh:
            for i in range(n):
                for j in range(a):
                    lower[i, j] *= F(1) - below[i, j] * below[i, j]
        elif layer > 0:
            for i in range(n):
                for j in range(a):
                    lower[i, j] = lower[i, j] if below[i, j] > F(0) else F(0)
        slope = lower
    if net.norm:
        d = net.widths[0]
        for i in range(n):
            for j in range(d):
                gradient[j] += slope[i, j] * inputs[i, j]
                gradient[d + j] += slope[i, j]


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def normalize(row: np.ndarray) -> None:
    """Logits (A,) to log-probabilities, in place."""
    most, total = row[0], F(0)
    for x in row:
        most = max(most, x)
    for j in range(len(row)):
        row[j] -= most
        total += F(math.exp(row[j]))
    for j in range(len(row)):
        row[j] -= F(math.log(total))


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def evaluate(weights: np.ndarray, net: NetworkShape, rows: np.ndarray, outputs: np.ndarray) -> None:
    """Write the outputs (N, out) of raw rows (N, D)."""
    space = np.empty(BLOCK * (net.widths.sum() + net.widths[0]), np.float32)
    block = np.empty((BLOCK, net.widths[0]), np.float32)
    for start in range(0, len(rows), BLOCK):
        part = rows[start : start + BLOCK]
        inputs = block[: len(part)]
        if net.norm:
            standardise(part, inputs)
        else:
            inputs[:] = part
        outputs[start : start + len(part)] = forward(weights, net, inputs, space)


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def act(
    outputs: np.ndarray,
    allowed: np.ndarray,
    noise: np.ndarray,
    greedy: np.ndarray,
    actions: np.ndarray,
    log_probs: np.ndarray,
) -> None:
    """Draw actions (N,) and their log-probabilities from logits (N, A), which become log-probabilities, and uniforms (N,).

    Like `Categorical.sample` it inverts the distribution function in float64, scaled by the rounded sum. `allowed` is (N,
    A), or (0, A) for all choices; rows in `greedy` (N,) take the most likely action.
    """
    for i in range(len(outputs)):
        row = outputs[i]
        if len(allowed):
            for j in range(len(row)):
                if not allowed[i, j]:
                    row[j] = FORBIDDEN
        normalize(row)
        choice = 0
        if greedy[i]:
            for j in range(len(row)):
                if row[j] > row[choice]:
                    choice = j
        else:
            total = F(0)
            for x in row:
                total += F(math.exp(x))
            level, edge = noise[i] * np.float64(total), F(0)
            for j in range(len(row) - 1):
                edge += F(math.exp(row[j]))
                choice += level >= np.float64(edge)
        actions[i], log_probs[i] = choice, row[choice]


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def policy_slopes(
    outputs: np.ndarray,
    allowed: np.ndarray,
    chosen: np.ndarray,
    data: DecisionArrays,
    terms: PPOTerms,
    sums: np.ndarray,
) -> None:
    """Turn logits (n, A) into the loss's gradient by them, for the decisions numbered `chosen` (n,); `sums` get the
    policy loss, the entropy, the divergence and the share of clipped decisions."""
    shares = np.empty(outputs.shape[1], np.float32)
    for i in range(len(outputs)):
        k, row = chosen[i], outputs[i]
        action, advantage = data.actions[k], data.advantages[k]
        if len(allowed):
            for j in range(len(row)):
                if not allowed[k, j]:
                    row[j] = FORBIDDEN
        most, total, entropy = row[0], F(0), 0.0
        for x in row:
            most = max(most, x)
        for j in range(len(row)):
            row[j] -= most
            shares[j] = F(math.exp(row[j]))
            total += shares[j]
        level = F(math.log(total))
        for j in range(len(row)):
            row[j] -= level
            shares[j] /= total
            entropy -= shares[j] * row[j]
        raw = row[action] - data.old_log_probs[k]
        change = min(max(raw, -LOG_RATIO_LIMIT), LOG_RATIO_LIMIT)
        ratio = math.exp(change)
        free, bounded = ratio * advantage, min(max(ratio, terms.low), terms.high) * advantage
        clipped, objective = bounded < free, min(free, bounded)
        if terms.dual_clip > 0 and advantage < 0 and objective < terms.dual_clip * advantage:
            clipped, objective = True, terms.dual_clip * advantage
        pull = 0.0 if clipped or raw != change else free
        sums[0] -= objective / terms.decisions
        sums[1] += entropy / terms.decisions
        sums[2] += (ratio - 1 - change) / terms.decisions
        sums[3] += clipped / terms.decisions
        for j in range(len(row)):
            slope = pull * (shares[j] - (j == action)) + terms.entropy_coef * shares[j] * (row[j] + entropy)
            row[j] = slope / terms.decisions


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def huber(error: float, delta: float) -> float:
    """The Huber loss of one error: half its square up to `delta`, linear beyond (Huber 1964)."""
    size = abs(error)
    return 0.5 * error * error if size <= delta else delta * (size - 0.5 * delta)


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def value_slopes(
    values: np.ndarray, chosen: np.ndarray, data: DecisionArrays, terms: PPOTerms, sums: np.ndarray
) -> None:
    """Turn values (n, 1) into the loss's gradient by them; `sums` get the value loss."""
    for i in range(len(values)):
        k = chosen[i]
        value, old, target = np.float64(values[i, 0]), data.old_values[k], data.returns[k]
        loss, share = huber(value - target, terms.huber_delta), 1.0
        if terms.value_clip > 0 and abs(value - old) > terms.value_clip:
            held = huber(old + math.copysign(terms.value_clip, value - old) - target, terms.huber_delta)
            share = 1.0 if loss > held else 0.5 if loss == held else 0.0
            loss = max(loss, held)
        slope = min(max(value - target, -terms.huber_delta), terms.huber_delta)
        sums[4] += loss / terms.decisions
        values[i, 0] = terms.value_coef * share * slope / terms.decisions


@numba.njit(cache=True, nogil=True, error_model="numpy")  # type: ignore[untyped-decorator]
def ppo_gradient(
    weights: np.ndarray,
    actor: NetworkShape,
    critic: NetworkShape,
    rows: np.ndarray,
    allowed: np.ndarray,
    chosen: np.ndarray,
    data: DecisionArrays,
    terms: PPOTerms,
    gradient: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Write the gradient (weights,) of PPO's loss over the decisions numbered `chosen`, and add to `sums` (5,) the policy
    loss, the entropy, the divergence, the share of clipped decisions and the value loss.

    `weights` are those of the actor, then those of the critic. `rows` (N, D) come normalised if the networks have norms.
    """
    block = BLOCK
    widest = max(actor.widths.max(), critic.widths.max())
    products = max(actor.size, critic.size)
    space = np.empty(block * (max(actor.widths.sum(), critic.widths.sum()) + widest), np.float32)
    room = np.empty((3, max(products, block * widest)), np.float32)
    part = np.empty((block, rows.shape[1]), np.float32)
    gradient[:] = 0
    for start in range(0, len(chosen), block):
        own = chosen[start : start + block]
        inputs = part[: len(own)]
        for i in range(len(own)):
            inputs[i] = rows[own[i]]
        outputs = forward(weights[: actor.size], actor, inputs, space)
        policy_slopes(outputs, allowed, own, data, terms, sums)
        backward(weights[: actor.size], gradient[: actor.size], actor, inputs, space, outputs, room)
        values = forward(weights[actor.size :], critic, inputs, space)
        value_slopes(values, own, data, terms, sums)
        backward(weights[actor.size :], gradient[actor.size :], critic, inputs, space, values, room)


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)  # type: ignore[untyped-decorator]
def adam_step(
    weights: np.ndarray,
    gradient: np.ndarray,
    first: np.ndarray,
    second: np.ndarray,
    rates: np.ndarray,
    decays: np.ndarray,
    bounds: np.ndarray,
    max_norm: float,
    betas: tuple[float, float],
    eps: float,
    step: int,
) -> float:
    """Clip the gradient of each part between `bounds` by its own norm, and take step number `step` (from 1) of AdamW.

    `rates` and `decays` (weights,) are the learning rate and the decay of every weight. Returns the first part's norm.
    """
    norm_of_first = 0.0
    correction, spread = F(1 - betas[0] ** step), F(math.sqrt(1 - betas[1] ** step))
    keep, keep_square, small = F(betas[0]), F(betas[1]), F(eps)
    for part in range(len(bounds) - 1):
        low, high, square = bounds[part], bounds[part + 1], F(0)
        for k in range(low, high):
            square += gradient[k] * gradient[k]
        norm = math.sqrt(square)
        scale = max_norm / (norm + 1e-6)
        factor = F(1) if scale > 1 else F(scale)
        if part == 0:
            norm_of_first = norm
        for k in range(low, high):
            g = gradient[k] * factor
            first[k] += (F(1) - keep) * (g - first[k])
            second[k] = keep_square * second[k] + (F(1) - keep_square) * g * g
            size = F(np.sqrt(second[k])) / spread + small
            weights[k] = weights[k] * (F(1) - rates[k] * decays[k]) - rates[k] / correction * first[k] / size
    return norm_of_first
