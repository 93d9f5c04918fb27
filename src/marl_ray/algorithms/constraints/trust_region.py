"""The constrained trust-region step of CPO (Achiam et al. 2017, arXiv 1705.10528) for any number of constraints.

With g the gradient of the reward LOSS, rows b_k the gradients of the cost surrogates, H the Fisher matrix and
c_k the constraint violations (all per decision, see `penalty.constraint_violation`), the step x to add to the weights is

    argmin  g.x    subject to    b_k.x + c_k <= 0 for every k    and    x'Hx / 2 <= delta

All signs are those of losses: g is the gradient of the loss to be minimised. With the gradient of the reward
instead, every formula below would need the opposite sign of r = b.H^-1 g. Without constraints the step is that of
TRPO (arXiv 1502.05477).

Vectors are flat, of D entries. A `product` is x -> Hx; in training it sums over all workers, so every loop here calls
it equally often on workers that hold equal vectors.
"""

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from marl_ray.errors import MarlRayError

MatrixProduct = Callable[[Tensor], Tensor]
Parameters = dict[str, Tensor]
DualCase = Literal["unconstrained", "constrained", "recovery"]

VANISHING_NORM = 1e-16
"""A gradient whose squared natural norm g'H^-1 g is below this number is only rounding."""
MAX_CONSTRAINTS = 8
"""Maximum number of constraints: a step is sought for every set of active ones, which are 256 of eight."""
CONSTRAINT_TOLERANCE = 1e-9
"""Relative rounding allowed when a candidate is checked against the constraints."""


def conjugate_gradient(
    product: MatrixProduct, target: Tensor, iterations: int = 10, tolerance: float = 1e-10
) -> Tensor:
    """Return x with Hx = target, (D,), for a symmetric positive definite H (Hestenes and Stiefel 1952).

    Starts at 0 and stops after `iterations` products, or once |Hx - target|^2 <= tolerance |target|^2; relative,
    because cost gradients are often smaller than any fixed bound. The iteration also stops on curvature that is not
    positive.
    """
    solution, residual = torch.zeros_like(target), target.clone()
    direction, squared_norm = residual.clone(), float(target.dot(target))
    bound = tolerance * squared_norm
    for _ in range(iterations):
        if not squared_norm > bound:
            break
        image = product(direction)
        curvature = float(direction.dot(image))
        if not curvature > 0:
            break
        rate = squared_norm / curvature
        solution += rate * direction
        residual -= rate * image
        squared_norm, previous = float(residual.dot(residual)), squared_norm
        direction = residual + (squared_norm / previous) * direction
    return solution


def flatten(tensors: Mapping[str, Tensor]) -> Tensor:
    """Return the tensors one after another, (D,)."""
    return torch.cat([tensor.reshape(-1) for tensor in tensors.values()])


def unflatten(vector: Tensor, like: Mapping[str, Tensor]) -> Parameters:
    """Undo `flatten`: return views of vector (D,) with the names and shapes of `like`."""
    parts = vector.split([tensor.numel() for tensor in like.values()])
    return {name: part.view_as(like[name]) for name, part in zip(like, parts, strict=True)}


def head_fisher_product(outputs: Tensor, tangent: Tensor, sizes: Sequence[int] | None) -> Tensor:
    """Return F t for the Fisher matrix F of a head with respect to its own outputs, (N, P).

    `sizes` are the categories of each part of a categorical head, whose normalised outputs are log-probabilities (-inf
    for a masked action): F = diag(p) - pp'. None stands for a Gaussian head with mean and log standard deviation: F =
    diag(1 / std^2, 2).
    """
    if sizes is None:
        log_std = outputs.chunk(2, -1)[1]
        mean_tangent, log_std_tangent = tangent.chunk(2, -1)
        return torch.cat([mean_tangent * (-2 * log_std).exp(), 2 * log_std_tangent], -1)
    p = outputs.exp()
    tangent = torch.where(p > 0, tangent, 0.0)
    parts = zip(p.split(list(sizes), -1), tangent.split(list(sizes), -1), strict=True)
    return torch.cat([q * (t - (q * t).sum(-1, keepdim=True)) for q, t in parts], -1)


def head_kl(old: Tensor, new: Tensor, sizes: Sequence[int] | None) -> Tensor:
    """Return the exact KL(old || new) between normalised outputs (N, P), (N,) in nats.

    `sizes` are those of `head_fisher_product`.
    """
    if sizes is None:
        (mean, log_std), (new_mean, new_log_std) = old.chunk(2, -1), new.chunk(2, -1)
        spread = (2 * (log_std - new_log_std)).exp() + (mean - new_mean).square() * (-2 * new_log_std).exp()
        return (new_log_std - log_std + 0.5 * (spread - 1)).sum(-1)
    p = old.exp()
    return (p * torch.where(p > 0, old - new, 0.0)).sum(-1)


def fisher_product(
    function: Callable[[Parameters], Tensor],
    parameters: Mapping[str, Tensor],
    weights: Tensor,
    sizes: Sequence[int] | None,
) -> MatrixProduct:
    """Return v -> sum_n weights_n J_n' F_n J_n v, (D,).

    The product is the Hessian of the weighted KL at `parameters`, times v. `function` maps parameters to normalised
    outputs (N, P) (`torch.func.functional_call` of the policy), J_n is its Jacobian at decision n and F_n the head's
    Fisher matrix. The Gauss-Newton form needs one forward-mode and one reverse pass, never the derivative of a
    gradient, and is positive semi-definite by construction; at the current weights it equals the Hessian. `weights`
    (N,) must add up to one over all micro-batches and workers, so that products over parts of a batch add up to the
    product over the batch. The caller adds the damping once, after that sum. The returned function keeps the graph of
    one forward pass alive. Fused attention has no forward mode: run a transformer under
    `torch.nn.attention.sdpa_kernel(SDPBackend.MATH)`.
    """
    detached = {name: tensor.detach() for name, tensor in parameters.items()}
    pull = torch.func.vjp(function, detached)[1]

    @torch.no_grad()
    def product(vector: Tensor) -> Tensor:
        outputs, tangent = torch.func.jvp(function, (detached,), (unflatten(vector, detached),))[:2]
        cotangent = weights.unsqueeze(-1) * head_fisher_product(outputs, tangent, sizes)
        return flatten(pull(cotangent.to(outputs.dtype))[0])

    return product


class TrustRegionStep(NamedTuple):
    """The step to add to the weights, and the case of the dual problem that it solves."""

    step: Tensor
    """(D,)."""
    case: DualCase
    """The problem that was solved; `recovery` means that no point of the trust region meets the constraints."""
    multipliers: tuple[float, ...]
    """nu_k >= 0: the loss that one unit of slack in constraint k would save; 0 where the constraint does not bind, and
    in a recovery."""
    trust_multiplier: float
    """lambda >= 0 of the trust region; 0 where it does not bind, and in a recovery."""


class _Solution(NamedTuple):
    """A step as coefficients of v = H^-1 g and of W = H^-1 B'.

    The other fields are those of TrustRegionStep.
    """

    along_gradient: float
    """Coefficient of v."""
    along_costs: Tensor
    """(K,) coefficients of the columns of W."""
    case: DualCase
    multipliers: tuple[float, ...]
    trust_multiplier: float


def _solve_active_set(
    active: list[int], q: float, r: Tensor, s: Tensor, c: Tensor, radius: float, resolution: float
) -> _Solution | None:
    """Return the minimiser over the trust region where the active constraints hold with equality.

    The result is None if no such point exists.

    x = -W S_A^-1 c_A - (v - W S_A^-1 r_A) / lambda: the step to the nearest point of the
    boundary, and then along the boundary down the loss. The two parts are H-orthogonal, so Pythagoras gives lambda.
    """
    inner = s[active][:, active]
    norms = inner.diagonal().sqrt()
    correlation = (inner + inner.T) / (2 * norms[:, None] * norms)
    if active and torch.linalg.eigvalsh(correlation)[0] < resolution**0.5:
        return None  # the gradients are dependent: a smaller set of them describes the same boundary
    to_boundary, along = torch.linalg.solve(inner, torch.stack([c[active], r[active]], -1)).unbind(-1)
    room = radius - float(c[active] @ to_boundary)
    if room < -CONSTRAINT_TOLERANCE * radius:
        return None
    gradient_along = q - float(r[active] @ along)
    # A norm that is only rounding: no direction along the boundary lowers the loss.
    blocked = gradient_along <= max(VANISHING_NORM, 8 * resolution * q)
    rate = 0.0 if blocked else math.sqrt(max(room, 0.0) / gradient_along)
    costs, multipliers = torch.zeros_like(c), torch.zeros_like(c)
    costs[active] = rate * along - to_boundary
    trust = 0.0 if rate == 0 else 1 / rate
    multipliers[active] = (trust * to_boundary - along).clamp(min=0)
    return _Solution(-rate, costs, "constrained" if active else "unconstrained", tuple(multipliers.tolist()), trust)


def _solve_dual(q: float, r: Tensor, s: Tensor, c: Tensor, delta: float, resolution: float) -> _Solution:
    """Return the step as coefficients of v = H^-1 g and of W = H^-1 B', from q = g.v, r = Bv and S = BW in float64.

    The problem is convex and its optimum is the candidate of its own active set, so the best candidate that keeps all
    constraints is the optimum. No step can change a constraint whose gradient vanishes, so it is left out.
    """
    radius = 2 * delta
    reach = (radius * s.diagonal()).clamp(min=0).sqrt()
    usable = [k for k in range(len(c)) if s[k, k] > VANISHING_NORM]
    best, best_loss = None, math.inf
    for size in range(len(usable) + 1):
        for active in itertools.combinations(usable, size):
            candidate = _solve_active_set(list(active), q, r, s, c, radius, resolution)
            if candidate is None:
                continue
            value = candidate.along_gradient * r + s @ candidate.along_costs + c
            if any(value[k] > CONSTRAINT_TOLERANCE * (reach[k] + abs(c[k])) for k in usable):
                continue
            loss = candidate.along_gradient * q + float(r @ candidate.along_costs)
            if best is None or loss < best_loss - CONSTRAINT_TOLERANCE * math.sqrt(radius * q):
                best, best_loss = candidate, loss
    if best is not None:
        return best
    worst = max(usable, key=lambda k: float(c[k] / reach[k]))
    costs = torch.zeros_like(c)
    costs[worst] = -math.sqrt(radius / float(s[worst, worst]))
    return _Solution(0.0, costs, "recovery", (0.0,) * len(c), 0.0)


def constrained_step(
    gradient: Tensor,
    cost_gradients: Tensor,
    violations: Tensor,
    delta: float,
    product: MatrixProduct,
    iterations: int = 10,
    tolerance: float = 1e-10,
) -> TrustRegionStep:
    """Return the step for loss gradient (D,), cost gradients (K, D) and violations (K,), K >= 0, within KL `delta`.

    If no point of the trust region meets the constraints, the step lowers the cost that is furthest out of reach,
    relative to how far the region reaches (section 6.2 of the paper). Gradients that are not finite give a step that is
    not finite, which `backtracking_line_search` rejects. The function takes at most (K + 1) iterations + 1 products.
    Conjugate gradients that stop early misjudge lengths, so the last product measures the step, which is shortened if it
    leaves the trust region. Raises MarlRayError for more than MAX_CONSTRAINTS violations.
    """
    if len(violations) > MAX_CONSTRAINTS:
        raise MarlRayError(f"constraints: expected at most {MAX_CONSTRAINTS}, got {len(violations)}")
    with torch.no_grad():
        v = conjugate_gradient(product, gradient, iterations, tolerance)
        directions = torch.stack([v, *(conjugate_gradient(product, b, iterations, tolerance) for b in cost_gradients)])
        gram = (torch.cat([gradient.unsqueeze(0), cost_gradients]).double() @ directions.double().T).cpu()
        c = violations.detach().double().cpu()
        if not bool(gram.isfinite().all() and c.isfinite().all()):
            return TrustRegionStep(torch.full_like(gradient, math.nan), "unconstrained", (0.0,) * len(c), 0.0)
        resolution = torch.finfo(gradient.dtype).eps
        # Column 0 holds B v, the exact change along v; row 0 equals it only once conjugate gradients have converged.
        solution = _solve_dual(float(gram[0, 0]), gram[1:, 0], gram[1:, 1:], c, delta, resolution)
        coefficients = torch.cat([torch.tensor([solution.along_gradient], dtype=torch.float64), solution.along_costs])
        step = (coefficients.to(directions) @ directions).to(gradient.dtype)
        square = float(step.dot(product(step)))
        if square > 2 * delta:
            step = step * math.sqrt(2 * delta / square)
    return TrustRegionStep(step, solution.case, solution.multipliers, solution.trust_multiplier)


class LineSearch(NamedTuple):
    """The result of a line search."""

    vector: Tensor
    """(D,) the accepted weights, or the very tensor `old`."""
    accepted: int | None
    """The number of times that the step was shortened; None if no candidate was accepted."""
    loss_change: float
    """Change of the reward loss; 0 if no candidate was accepted."""
    cost_changes: tuple[float, ...]
    """Change of each cost surrogate, likewise."""
    kl: float
    """KL divergence (nats) of the policy at `vector` from the old one; 0 if no candidate was accepted."""


def backtracking_line_search(
    evaluate: Callable[[Tensor], tuple[float, Sequence[float], float]],
    old: Tensor,
    step: Tensor,
    violations: Sequence[float],
    delta: float,
    coefficient: float = 0.8,
    steps: int = 10,
) -> LineSearch:
    """Return the first candidate old + coefficient^j step that keeps what the step promised, else `old` itself.

    j runs from 0 to steps - 1. To keep it means: KL <= delta; every cost surrogate rises by at most max(-c_k, 0); and
    the reward loss does not rise, unless some constraint was violated at the start, where lower cost is worth reward. A
    value that is not finite is a rejection.

    `evaluate` takes weights (D,) and returns the surrogate loss, the K surrogate costs and the KL from `old`; equal on all
    workers. It is called for `old` first and may leave its last candidate in the network, so the caller must write
    `vector` back in every case.
    """
    loss, costs, _ = evaluate(old)
    allowed = [max(-float(c), 0.0) for c in violations]
    feasible = all(float(c) <= 0 for c in violations)
    for j in range(steps):
        vector = old + coefficient**j * step
        new_loss, new_costs, kl = evaluate(vector)
        changes = tuple(float(new) - float(old_cost) for new, old_cost in zip(new_costs, costs, strict=True))
        change = float(new_loss) - float(loss)
        if not all(math.isfinite(number) for number in (change, kl, *changes)):
            continue
        within = all(rise <= limit for rise, limit in zip(changes, allowed, strict=True))
        if kl <= delta and within and (change <= 0 or not feasible):
            return LineSearch(vector, j, change, changes, float(kl))
    return LineSearch(old, None, 0.0, (0.0,) * len(allowed), 0.0)
