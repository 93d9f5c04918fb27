"""Says from a run's metrics what is wrong with it, in sentences that name the keys to change."""

import math
from collections.abc import Iterator, Mapping, Sequence

from marl_ray.json_types import JsonMapping
from marl_ray.training.run_folder.metrics_file import iteration_of

_Rows = Sequence[Mapping[str, float]]

COLLAPSED_SHARE = 0.02
"""Share of its greatest value below which entropy counts as gone."""
UNDECIDED_SHARE = 0.9
"""Share of its greatest value above which entropy counts as that of a policy that has not decided."""
MAX_KL = 0.5
"""Divergence of one update above which the step was too large; usual are 0.0001 to 0.05."""
MIN_KL = 1e-6
"""Divergence of every update below which the policy stands still."""
MAX_VALUE_LOSS = 50.0
"""Value loss above which the critic diverged, in units of the normaliser, in which returns have a variance of one."""
MIN_NORM = 1e-6
"""Norm of the gradient below which nothing is learned."""
ZERO_RETURN = 1e-9
"""Size of a return, or of a difference of returns, that is 0 but for rounding."""
MIN_GROUPS = 0.01
"""Share of informative groups below which comparisons teach nothing."""
MIN_EXPLAINED_VARIANCE = -5.0
"""Explained variance below which a critic is far worse than one number for all states."""
EARLY_SHARE = 0.25
"""Part of a run's steps in which no healthy run stops changing."""
LATE_SHARE = 0.75
"""Part of a run's steps after which a healthy critic no longer diverges."""


def diagnose(config: JsonMapping, rows: _Rows) -> list[str]:
    """Return the sentences about what is wrong with a run; empty for a run that learns.

    The sentences are about a run whose return did not rise, or fell again, and about policies that show what no
    healthy run shows.

    `config` is the run's config as plain data with every default written out, `rows` are those of its
    `metrics.jsonl`. A run of fewer than two evaluations is judged by its training episodes.
    """
    rows = [row for row in rows if iteration_of(row) >= 0]
    metric = "eval/return" if len({row["steps"] for row in rows if "eval/return" in row}) > 1 else "return"
    scored = [row for row in rows if metric in row]
    trained = {name: policy for name, policy in config["team"].items() if not policy["frozen"]}
    skilled = bool(config["resume_from"] or any(policy["bundle"] for policy in trained.values()))
    return_sentence = _describe_return(metric, scored, skilled) if len(scored) > 1 else None
    sentences = [] if return_sentence is None else [return_sentence]
    for name, policy in trained.items():
        prefix, path = (f"{name}/", f"team.{name}.hyper") if len(trained) > 1 else ("", "hyper")
        if return_sentence is not None or _is_broken(prefix, rows):
            sentences += _describe_policy(prefix, _HyperKeys(path, policy["hyper"]), rows)
    return sentences


def has_only_return_news(sentences: Sequence[str]) -> bool:
    """Return True if `diagnose` says no more than how the return went, which is no news after a short run."""
    return len(sentences) == 1 and sentences[0].startswith(("eval/return ", "return "))


class _HyperKeys:
    """The hyper-parameters of a policy as users name them."""

    def __init__(self, prefix: str, hyper: JsonMapping):
        self.prefix, self.hyper = prefix, hyper

    def __call__(self, key: str) -> str:
        """Return a text such as `hyper.lr=10`, without the value where the algorithm does not read the key."""
        value = self.hyper.get(key)
        return f"{self.prefix}.{key}" + ("" if value is None else f"={value:g}")

    @property
    def gradient_steps(self) -> int:
        """Gradient steps on a batch. Before the first of them the divergence is 0, whatever the steps do."""
        return (self.hyper.get("epochs") or 1) * (self.hyper.get("minibatches") or 1)


def _describe_return(metric: str, scored: _Rows, skilled: bool) -> str | None:
    """Describe a return that did not rise, or did not stay; None for one that did.

    `skilled` says that the run began with weights of another run.
    """
    first, last, best = scored[0], scored[-1], max(scored, key=lambda row: row[metric])
    value = first[metric]
    returns = [row.get(f"{metric}{end}", math.inf) for row in scored for end in ("", "_low", "_high")]
    if max(map(abs, returns)) < ZERO_RETURN:
        return (
            f"{metric} is 0 in every evaluated episode: no reward was met, or those of opponents cancel, because a return "
            "is averaged over all agents"
        )
    greedy = [row.get("eval/greedy_return", value) for row in scored]
    if all(math.isclose(other, value, abs_tol=ZERO_RETURN) for other in (*returns, *greedy)):
        solved = "the weights of the other run earn all there is, " if skilled else ""
        return (
            f"every episode returned {value:,.3f}: {solved}the reward does not depend on what the policies do, or no "
            "episode met another"
        )
    if last[metric] <= value:
        return f"{metric} did not rise: {_at_step(first, metric)}, {_at_step(last, metric)}"
    high = first.get(f"{metric}_high", first[metric])
    if last[metric] <= high:
        return (
            f"{metric} rose no more than chance explains: {_at_step(first, metric)}, whose 95 % interval ends at "
            f"{high:.3f}, {_at_step(last, metric)}"
        )
    if last.get(f"{metric}_high", last[metric]) < best.get(f"{metric}_low", last[metric]):
        return f"{metric} fell again: {_at_step(best, metric)}, {_at_step(last, metric)}"
    return None


def _is_broken(prefix: str, rows: _Rows) -> bool:
    """Return True if a policy shows what no healthy run shows, whatever its return did.

    The policy has not changed since the first part of the run, though its groups differ, or its critic is still
    diverging in the last part. An entropy of 0 is no such sign: a good run ends so.
    """
    since = _first_row_below(rows, f"{prefix}grad_norm", MIN_NORM)
    is_stuck = since is not None and since["steps"] <= EARLY_SHARE * rows[-1]["steps"]
    groups_agree = _first_row_below(rows, f"{prefix}informative_groups", MIN_GROUPS) is not None
    return (is_stuck and not groups_agree) or any(_diverging_signs(prefix, rows))


def _diverging_signs(prefix: str, rows: _Rows) -> tuple[bool, bool]:
    """Return the signs of a critic that diverges: of its value_loss, and of its explained_variance.

    A sign is True if the metric is beyond its bound in every row of the last part of a run.
    """
    late = [row for row in rows if row["steps"] >= LATE_SHARE * rows[-1]["steps"]]
    losses, explained = (
        [row[f"{prefix}{name}"] for row in late if f"{prefix}{name}" in row]
        for name in ("value_loss", "explained_variance")
    )
    return (
        bool(losses) and min(losses) > MAX_VALUE_LOSS,
        bool(explained) and max(explained) < MIN_EXPLAINED_VARIANCE,
    )


def _describe_policy(prefix: str, keys: _HyperKeys, rows: _Rows) -> Iterator[str]:
    entropy, kl, value_loss = ([row for row in rows if f"{prefix}{n}" in row] for n in ("entropy", "kl", "value_loss"))
    yield from _describe_entropy(f"{prefix}entropy", keys, entropy, rows)
    if kl:
        largest = max(kl, key=lambda row: row[f"{prefix}kl"])
        if largest[f"{prefix}kl"] > MAX_KL:
            reached = _at_step(largest, f"{prefix}kl")
            yield f"{prefix}kl was {reached}: an update changed too much, {keys('lr')} may be too high"
        elif largest[f"{prefix}kl"] < MIN_KL and keys.gradient_steps > 1:
            yield f"{prefix}kl is at most {largest[f'{prefix}kl']:.1g}: the policy stands still, {keys('lr')} may be too low"
    largest = max(value_loss, key=lambda row: row[f"{prefix}value_loss"], default={})
    rate = keys("lr" if keys.hyper.get("critic_lr") is None else "critic_lr")
    if largest.get(f"{prefix}value_loss", 0.0) > MAX_VALUE_LOSS:
        reached = _at_step(largest, f"{prefix}value_loss")
        yield f"{prefix}value_loss was {reached}: the critic diverged, {rate} may be too high"
    elif _diverging_signs(prefix, rows)[1]:
        last = next(row for row in reversed(rows) if f"{prefix}explained_variance" in row)
        yield (
            f"{prefix}explained_variance is {_at_step(last, f'{prefix}explained_variance')}: the critic is far worse than "
            f"one number for all states, {rate} may be too high"
        )
    since = _first_row_below(rows, f"{prefix}informative_groups", MIN_GROUPS)
    if since is not None:
        yield (
            f"{prefix}informative_groups is 0 since step {since['steps']:,.0f}: all members of a group score the same, "
            "train.group_size may be too small or the tasks too hard"
        )
    since = _first_row_below(rows, f"{prefix}grad_norm", MIN_NORM)
    if since is not None:
        yield f"{prefix}grad_norm is 0 since step {since['steps']:,.0f}: nothing is learned any more"


def _describe_entropy(name: str, keys: _HyperKeys, entropies: _Rows, rows: _Rows) -> Iterator[str]:
    if not entropies:
        return
    greatest, last = max(row[name] for row in entropies), entropies[-1]
    if greatest <= 0:  # of continuous actions: a density's entropy, without a natural zero
        return
    since = _first_row_below(entropies, name, COLLAPSED_SHARE * greatest)
    if since is not None:
        yield (
            f"{name} fell to {last[name]:.2f} by step {since['steps']:,.0f}: the policy no longer explores, "
            f"{keys('lr')} may be too high or {keys('entropy_coef')} too low"
        )
    played = next((row for row in reversed(rows) if "eval/greedy_return" in row), None)
    if played is None or last[name] < UNDECIDED_SHARE * greatest:
        return
    drawn = played.get("eval/return", played["eval/greedy_return"])
    if played["eval/greedy_return"] > max(drawn, played.get("eval/return_high", drawn)):
        yield (
            f"eval/greedy_return is {played['eval/greedy_return']:.3f}, though eval/return is {drawn:.3f}: the policy has "
            f"learned, and draws its actions nearly evenly ({name} {last[name]:.2f}), "
            f"{keys('entropy_coef')} may be too high"
        )


def _first_row_below(rows: _Rows, name: str, bound: float) -> Mapping[str, float] | None:
    """Return the row from which on a metric stays below a bound; None if the last row with the metric is not below."""
    first = None
    for row in reversed([row for row in rows if name in row]):
        if row[name] >= bound:
            break
        first = row
    return first


def _at_step(row: Mapping[str, float], name: str) -> str:
    return f"{row[name]:z,.3f} at step {row['steps']:,.0f}"
