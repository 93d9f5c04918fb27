"""Small perceptrons compiled by numba on BLAS, which act and compute the gradient of PPO's loss.

They do without torch's dispatch. A network is one row of float32 weights in the order of its `parameters()`, and its
`widths` (layers + 1,): those of the input, the hidden layers and the output. Its input is a row of numbers (D,) or, for
categories, a row of codes (K,). A code stands for some entries' categories, and so for some rows of the first layer's
weights, which that layer adds up. Rows pass in blocks that stay in the processor's cache. All code that calls each
other stands in this one file, because numba's cache on disk notices a change only in the file that it compiles.
`error_model="numpy"` matters: checks of divisors for zero would keep the compiler from computing sixteen numbers at
once.
"""

import math

import numba
import numpy as np

from marl_ray.policies.actor_critic.compiled.arguments import DecisionArrays, NetworkInputs, NetworkShape, PPOSettings

F = np.float32
FAST_MATH = {"contract", "nsz", "arcp", "reassoc"}
"""Liberties of the compiler that leave NaN and infinity what they are, because they show a run that diverged."""
BLOCK = 128  # rows that pass at once: as many as BLAS multiplies fastest
# Those of distributions.py and ratios.py, as a test sees; the cache on disk would not notice a change there.
FORBIDDEN_LOGIT, LOG_RATIO_LIMIT = F(-1e9), 20.0


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def activate(rows: np.ndarray, bias: np.ndarray, tanh: bool) -> None:
    """Add the bias to (n, width) and apply the activation, in place; tanh by Eigen's ratio of polynomials, exact to 3e-7."""
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


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def standardize(rows: np.ndarray, out: np.ndarray) -> None:
    """Standardise each row (N, D): less its mean, over its standard deviation as torch's layer norm has it."""
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


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def join(matrix: np.ndarray, parts: np.ndarray, bounds: np.ndarray, table: np.ndarray) -> None:
    """Write each code's sum of rows of `matrix`, `parts[bounds[c] : bounds[c + 1]]`, to the table (codes, width)."""
    for c in range(len(table)):
        out = table[c]
        out[:] = F(0)
        for part in parts[bounds[c] : bounds[c + 1]]:
            category_row = matrix[part]
            for j in range(len(out)):
                out[j] += category_row[j]


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def disjoin(slopes: np.ndarray, parts: np.ndarray, bounds: np.ndarray, gradient: np.ndarray) -> None:
    """Add the slopes (codes, width) of the table that `join` wrote to the gradient of the matrix."""
    for c in range(len(slopes)):
        slope = slopes[c]
        for part in parts[bounds[c] : bounds[c + 1]]:
            category_row = gradient[part]
            for j in range(len(slope)):
                category_row[j] += slope[j]


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def gather(table: np.ndarray, codes: np.ndarray, out: np.ndarray) -> None:
    """Write the sum of the rows of the table (codes, width) that each row of codes (n, K) names; `out` is (n, width)."""
    entries = codes.shape[1]
    for i in range(len(codes)):
        row, row_codes = out[i], codes[i]
        row[:] = F(0)
        for k in range(0, entries - 3, 4):  # four at once: the sum is read and written a fourth as often
            w, x, y, z = table[row_codes[k]], table[row_codes[k + 1]], table[row_codes[k + 2]], table[row_codes[k + 3]]
            for j in range(len(row)):
                row[j] += (w[j] + x[j]) + (y[j] + z[j])
        for k in range(entries // 4 * 4, entries):
            w = table[row_codes[k]]
            for j in range(len(row)):
                row[j] += w[j]


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def scatter(slope: np.ndarray, codes: np.ndarray, slopes: np.ndarray) -> None:
    """Add each row of slopes (n, width) to the rows of `slopes` (codes, width) that its codes (n, K) name."""
    for i in range(len(codes)):
        row = slope[i]
        for c in codes[i]:
            code_slopes = slopes[c]
            for j in range(len(row)):
                code_slopes[j] += row[j]


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def forward(
    weights: np.ndarray, net: NetworkShape, inputs: np.ndarray, codes: np.ndarray, table: np.ndarray, space: np.ndarray
) -> np.ndarray:
    """Return the outputs (n, out) of rows (n, D), or of codes (n, K), whose sums the `table` has (see `join`).

    `space` keeps, in order, the scaled input if there is a norm, whose rows come normalised, and every layer's outputs.
    """
    n, at, used, hidden = len(codes) if net.coded else len(inputs), 0, 0, inputs
    if net.norm:
        d = net.widths[0]
        hidden, used, at = space[: n * d].reshape(n, d), n * d, 2 * d
        for i in range(n):
            for j in range(d):
                hidden[i, j] = inputs[i, j] * weights[j] + weights[d + j]
    for layer in range(len(net.widths) - 1):
        a, b = net.widths[layer], net.widths[layer + 1]
        bias = weights[at + a * b : at + a * b + b]
        out = space[used : used + n * b].reshape(n, b)
        if layer == 0 and net.coded:
            gather(table, codes, out)
        else:
            np.dot(hidden, weights[at : at + a * b].reshape(b, a).T, out)
        if layer + 2 < len(net.widths):
            activate(out, bias, net.tanh)
        else:
            for i in range(n):
                for j in range(b):
                    out[i, j] += bias[j]
        hidden, used, at = out, used + n * b, at + a * b + b
    return hidden


@numba.njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST_MATH)
def backward(
    weights: np.ndarray,
    gradient: np.ndarray,
    net: NetworkShape,
    inputs: np.ndarray,
    codes: np.ndarray,
    slopes: np.ndarray,
    space: np.ndarray,
    slope: np.ndarray,
    room: np.ndarray,
) -> None:
    """Add the gradient of the weights to `gradient`, but that of a table of codes, if there is one, to `slopes`.

    `slope` (n, out) is that of the outputs, `space` is what `forward` left, and `room` (3, ...) is memory for products.
    """
    n, at, used = len(slope), net.size, 0
    for width in net.widths[1:]:
        used += n * width
    if net.norm:
        used += n * net.widths[0]
    for layer in range(len(net.widths) - 2, -1, -1):
        a, b = net.widths[layer], net.widths[layer + 1]
        at -= a * b + b
        used -= n * b
        bias = gradient[at + a * b : at + a * b + b]
        for i in range(n):
            for j in range(b):
                bias[j] += slope[i, j]
        if layer == 0 and net.coded:
            scatter(slope, codes, slopes)
            break
        below = inputs
        if layer > 0 or net.norm:
            below = space[used - n * a : used].reshape(n, a)
        product = room[0, : a * b]
        np.dot(slope.T, below, product.reshape(b, a))
        for k in range(a * b):
            gradient[at + k] += product[k]
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


@numba.njit(cache=True, nogil=True, error_model="numpy")
def copy_rows(source: np.ndarray, target: np.ndarray) -> None:
    """Copy rows (n, D) number by number: the copy of a slice takes numba a second to compile."""
    for i in range(len(source)):
        for j in range(source.shape[1]):
            target[i, j] = source[i, j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def joined_table(weights: np.ndarray, net: NetworkShape, inputs: NetworkInputs) -> np.ndarray:
    """Return the table of the inputs' codes (codes, width); without rows for a network over vectors."""
    if not net.coded:
        return np.empty((0, 0), np.float32)
    a, b = net.widths[0], net.widths[1]
    table = np.empty((len(inputs.bounds) - 1, b), np.float32)
    join(weights[: a * b].reshape(a, b), inputs.parts, inputs.bounds, table)
    return table


@numba.njit(cache=True, nogil=True, error_model="numpy")
def evaluate(weights: np.ndarray, net: NetworkShape, inputs: NetworkInputs, outputs: np.ndarray) -> None:
    """Write the outputs (R, out) of the inputs, whose rows are raw."""
    space = np.empty(BLOCK * net.row_space, np.float32)
    block, table = np.empty((BLOCK, inputs.rows.shape[1]), np.float32), joined_table(weights, net, inputs)
    for start in range(0, len(outputs), BLOCK):
        rows, codes = inputs.rows[start : start + BLOCK], inputs.codes[start : start + BLOCK]
        if net.norm:
            standardize(rows, block[: len(rows)])
            rows = block[: len(rows)]
        copy_rows(forward(weights, net, rows, codes, table, space), outputs[start : start + BLOCK])


@numba.njit(cache=True, nogil=True, error_model="numpy")
def policy_slopes(
    outputs: np.ndarray,
    allowed: np.ndarray,
    bounds: np.ndarray,
    decisions: np.ndarray,
    data: DecisionArrays,
    terms: PPOSettings,
    sums: np.ndarray,
) -> None:
    """Turn logits (n, A) into dL/dz (`PPOSettings`); add loss, entropy, divergence and share of clipped decisions to `sums`.

        dL/dz_j = r A (p_j - [j = a]) + c p_j (log p_j + H)          as d log p_a / dz_j = [j = a] - p_j

    Row i is that of the decisions `decisions[bounds[i] : bounds[i + 1]]`, at least one. The first term is 0 where L does not
    depend on r: the clip's side is the lower one, the dual clip holds, or log r is beyond its limit. At a tie both sides
    have the same gradient: r is inside of the clip, or A is 0.
    """
    count = outputs.shape[1]
    logs, shares, slopes = np.empty(count, np.float32), np.empty(count, np.float32), np.empty(count, np.float32)
    for i in range(len(outputs)):
        entropy = 0.0
        slopes[:] = F(0)
        for place in range(bounds[i], bounds[i + 1]):
            k = decisions[place]
            action, advantage = data.actions[k], data.advantages[k]
            if place == bounds[i] or len(allowed):  # decisions of one row differ in nothing else
                peak, total, entropy = F(-np.inf), F(0), 0.0
                for j in range(count):
                    logs[j] = FORBIDDEN_LOGIT if len(allowed) and not allowed[k, j] else outputs[i, j]
                    peak = max(peak, logs[j])
                for j in range(count):
                    logs[j] -= peak
                    shares[j] = F(math.exp(logs[j]))
                    total += shares[j]
                level = F(math.log(total))
                for j in range(count):
                    logs[j] -= level
                    shares[j] /= total
                    entropy -= shares[j] * logs[j]
            raw = logs[action] - data.old_log_probs[k]
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
            for j in range(count):
                slope = pull * (shares[j] - (j == action)) + terms.entropy_coef * shares[j] * (logs[j] + entropy)
                slopes[j] += slope / terms.decisions
        for j in range(count):
            outputs[i, j] = slopes[j]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def huber(error: float, delta: float) -> float:
    """Return the Huber loss of one error: half its square up to `delta`, linear beyond (Huber 1964)."""
    size = abs(error)
    return 0.5 * error * error if size <= delta else delta * (size - 0.5 * delta)


@numba.njit(cache=True, nogil=True, error_model="numpy")
def value_slopes(
    values: np.ndarray,
    bounds: np.ndarray,
    decisions: np.ndarray,
    data: DecisionArrays,
    terms: PPOSettings,
    sums: np.ndarray,
) -> None:
    """Turn values (n, heads) into dL/dv (see `PPOSettings`), of decisions as in `policy_slopes`; `sums` get the value loss.

        dL/dv = s w h'(v - R)          h'(e) = clip(e, -delta, delta)

    s is 1 within the value clip. Beyond it v_c is constant: s is 1 where h(v - R) is the greater loss, 0 where it is the
    smaller, and 1/2 where both are equal, as torch divides the gradient of `maximum` at a tie.
    """
    slopes = np.empty(values.shape[1])
    for i in range(len(values)):
        slopes[:] = 0.0
        for k in decisions[bounds[i] : bounds[i + 1]]:
            value, old, target = np.float64(values[i, data.heads[k]]), data.old_values[k], data.returns[k]
            loss, share = huber(value - target, terms.huber_delta), 1.0
            if terms.value_clip > 0 and abs(value - old) > terms.value_clip:
                held = huber(old + math.copysign(terms.value_clip, value - old) - target, terms.huber_delta)
                share = 1.0 if loss > held else 0.5 if loss == held else 0.0
                loss = max(loss, held)
            slope = min(max(value - target, -terms.huber_delta), terms.huber_delta)
            sums[4] += loss / terms.decisions
            slopes[data.heads[k]] += terms.value_coef * share * slope / terms.decisions
        for head in range(len(slopes)):
            values[i, head] = slopes[head]


@numba.njit(cache=True, nogil=True, error_model="numpy")
def network_gradient(
    weights: np.ndarray,
    net: NetworkShape,
    is_critic: bool,
    inputs: NetworkInputs,
    allowed: np.ndarray,
    minibatch: tuple[np.ndarray, np.ndarray, np.ndarray],
    data: DecisionArrays,
    terms: PPOSettings,
    gradient: np.ndarray,
    sums: np.ndarray,
) -> None:
    """Write the gradient (weights,) of one network's part of PPO's loss, and add its metrics to `sums` (5,).

    `minibatch` are its decisions by their rows (see `rows.sort_by_row`); those of one row pass as one. Two threads may run
    actor and critic at once.
    """
    rows_of, codes_of = inputs.rows, inputs.codes
    widest = max(net.widths[1:].max(), rows_of.shape[1])
    space = np.empty(BLOCK * net.row_space, np.float32)
    room = np.empty((3, max(net.max_product, BLOCK * widest)), np.float32)
    part, part_codes = np.empty((BLOCK, rows_of.shape[1]), np.float32), np.empty((BLOCK, codes_of.shape[1]), np.int32)
    used, bounds, decisions = minibatch
    table = joined_table(weights, net, inputs)
    slopes = np.zeros_like(table)
    gradient[:] = 0
    for start in range(0, len(used), BLOCK):
        block_rows, ends = used[start : start + BLOCK], bounds[start : start + BLOCK + 1]
        for i, row in enumerate(block_rows):
            for j in range(codes_of.shape[1]):
                part_codes[i, j] = codes_of[row, j]
            for j in range(rows_of.shape[1]):
                part[i, j] = rows_of[row, j]
        rows, codes = part[: len(block_rows)], part_codes[: len(block_rows)]
        outputs = forward(weights, net, rows, codes, table, space)
        if is_critic:
            value_slopes(outputs, ends, decisions, data, terms, sums)
        else:
            policy_slopes(outputs, allowed, ends, decisions, data, terms, sums)
        backward(weights, gradient, net, rows, codes, slopes, space, outputs, room)
    if net.coded:
        a, b = net.widths[0], net.widths[1]
        disjoin(slopes, inputs.parts, inputs.bounds, gradient[: a * b].reshape(a, b))
