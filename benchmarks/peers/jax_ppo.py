"""PPO compiled as one program of JAX, laid out as PureJaxRL does it.

    python jax_ppo.py --task simple_spread --copies 16 --steps 128 --minibatches 4 --updates 50

Rollout, advantages, epochs and minibatches are nested scans, and all updates of a run are one call. Runs in a Python of
its own; prints one line of JSON. Agents share one policy, as in JaxMARL's IPPO. Steps are those of the environment, not
of its agents.
"""

import argparse
import json
import math
import time
from importlib.metadata import version
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

WIDTH, GAMMA, LAMBDA, CLIP, VALUE, NORM = 64, 0.99, 0.95, 0.2, 0.5, 0.5
"""Units of a layer, discount, GAE's lambda, PPO's clip, weight of the value loss, greatest norm of a gradient."""


class World(NamedTuple):
    """A task whose observations are (agents, size), its rewards (agents,)."""

    reset: Any
    step: Any
    agents: int
    size: int
    actions: int


class Moment(NamedTuple):
    """A step of all copies, as arrays (copies, agents, ...)."""

    obs: jax.Array
    action: jax.Array
    log_prob: jax.Array
    value: jax.Array
    reward: jax.Array
    done: jax.Array
    ended: jax.Array
    """Return of the episode that this step ended; 0 where none did."""


def simple_spread() -> World:
    import jaxmarl

    env = jaxmarl.make("MPE_simple_spread_v3")

    def stack_agents(values: dict[str, jax.Array]) -> jax.Array:
        return jnp.stack([values[agent] for agent in env.agents])

    def reset(key: jax.Array) -> Any:
        obs, state = env.reset(key)
        return stack_agents(obs), state

    def step(key: jax.Array, state: Any, actions: jax.Array) -> Any:
        chosen = {agent: actions[k] for k, agent in enumerate(env.agents)}
        obs, state, rewards, dones, _ = env.step(key, state, chosen)
        return stack_agents(obs), state, stack_agents(rewards), dones["__all__"]

    first = env.agents[0]
    size = env.observation_space(first).shape[0]
    return World(reset, step, len(env.agents), size, int(env.action_space(first).n))


def cartpole() -> World:
    import gymnax

    env, params = gymnax.make("CartPole-v1")

    def reset(key: jax.Array) -> Any:
        obs, state = env.reset(key, params)
        return obs[None], state

    def step(key: jax.Array, state: Any, actions: jax.Array) -> Any:
        obs, state, reward, terminated, truncated, _ = env.step(key, state, actions[0], params)
        return obs[None], state, reward[None], jnp.logical_or(terminated, truncated)

    return World(reset, step, 1, 4, 2)


WORLDS = {"simple_spread": simple_spread, "cartpole": cartpole}


def layers(key: jax.Array, widths: list[int], last: float) -> list[tuple[jax.Array, jax.Array]]:
    scales = [2**0.5] * (len(widths) - 2) + [last]
    made = []
    for layer_key, rows, columns, scale in zip(
        jax.random.split(key, len(scales)), widths[:-1], widths[1:], scales, strict=True
    ):
        made.append((jax.nn.initializers.orthogonal(scale)(layer_key, (rows, columns)), jnp.zeros(columns)))
    return made


def network(weights: list[tuple[jax.Array, jax.Array]], rows: jax.Array) -> jax.Array:
    for matrix, bias in weights[:-1]:
        rows = jnp.tanh(rows @ matrix + bias)
    return rows @ weights[-1][0] + weights[-1][1]


def chosen_log_prob(logits: jax.Array, actions: jax.Array) -> jax.Array:
    return jnp.take_along_axis(jax.nn.log_softmax(logits), actions[..., None], -1)[..., 0]


def trainer(world: World, options: argparse.Namespace) -> Any:
    """Return the whole training as a function of a key.

    It returns the mean return of the episodes that ended in each update.
    """
    copies, steps, minibatches = options.copies, options.steps, options.minibatches
    rows = copies * steps * world.agents
    gradient_steps = options.epochs * minibatches

    def rate(count: jax.Array) -> jax.Array:
        return options.lr * (1.0 - (count // gradient_steps) / options.updates)

    rule = optax.chain(optax.clip_by_global_norm(NORM), optax.adam(rate if options.decay else options.lr, eps=1e-5))

    def loss(weights: Any, batch: Any) -> jax.Array:
        moments, advantages, targets = batch
        logits, values = network(weights["actor"], moments.obs), network(weights["critic"], moments.obs)[..., 0]
        ratio = jnp.exp(chosen_log_prob(logits, moments.action) - moments.log_prob)
        advantages = (advantages - advantages.mean()) / (advantages.std() + 1e-8)
        gain = jnp.minimum(ratio * advantages, jnp.clip(ratio, 1 - CLIP, 1 + CLIP) * advantages).mean()
        near = moments.value + jnp.clip(values - moments.value, -CLIP, CLIP)
        error = 0.5 * jnp.maximum((values - targets) ** 2, (near - targets) ** 2).mean()
        log_probs = jax.nn.log_softmax(logits)
        entropy = -(jnp.exp(log_probs) * log_probs).sum(-1).mean()
        return -gain + VALUE * error - options.entropy * entropy

    def act(carry: Any, _: Any) -> Any:
        weights, state, obs, returns, key = carry
        key, drawn, moved = jax.random.split(key, 3)
        logits, value = network(weights["actor"], obs), network(weights["critic"], obs)[..., 0]
        action = jax.random.categorical(drawn, logits)
        seen, state, reward, done = jax.vmap(world.step)(jax.random.split(moved, copies), state, action)
        returns = returns + reward.mean(-1)
        ended = jnp.where(done, returns, 0.0)
        ends = jnp.broadcast_to(done[:, None], reward.shape)
        moment = Moment(obs, action, chosen_log_prob(logits, action), value, reward, ends, ended)
        return (weights, state, seen, jnp.where(done, 0.0, returns), key), moment

    def back(carry: Any, moment: Moment) -> Any:
        advantage, after = carry
        going = 1.0 - moment.done
        delta = moment.reward + GAMMA * after * going - moment.value
        advantage = delta + GAMMA * LAMBDA * going * advantage
        return (advantage, moment.value), advantage

    def learn(carry: Any, batch: Any) -> Any:
        weights, moments = carry
        gradient = jax.grad(loss)(weights, batch)
        change, moments = rule.update(gradient, moments, weights)
        return (optax.apply_updates(weights, change), moments), None

    def epoch(carry: Any, key: jax.Array) -> Any:
        learner, batch = carry
        order = jax.random.permutation(key, rows)
        parts = jax.tree.map(lambda x: x[order].reshape(minibatches, -1, *x.shape[1:]), batch)
        learner, _ = jax.lax.scan(learn, learner, parts)
        return (learner, batch), None

    def update(carry: Any, _: Any) -> Any:
        learner, state, obs, returns, key = carry
        begun = (learner[0], state, obs, returns, key)
        (_, state, obs, returns, key), moments = jax.lax.scan(act, begun, None, steps)
        after = network(learner[0]["critic"], obs)[..., 0]
        _, advantages = jax.lax.scan(back, (jnp.zeros_like(after), after), moments, reverse=True)
        batch = (moments._replace(ended=moments.value), advantages, advantages + moments.value)
        flat = jax.tree.map(lambda x: x.reshape(rows, *x.shape[3:]), batch)
        key, shuffled = jax.random.split(key)
        (learner, _), _ = jax.lax.scan(epoch, (learner, flat), jax.random.split(shuffled, options.epochs))
        ends = moments.done[..., 0].sum()
        mean = jnp.where(ends > 0, moments.ended.sum() / jnp.maximum(ends, 1), jnp.nan)
        return (learner, state, obs, returns, key), mean

    def train(key: jax.Array) -> jax.Array:
        key, first, second, begun = jax.random.split(key, 4)
        widths = [world.size, WIDTH, WIDTH]
        weights = {"actor": layers(first, [*widths, world.actions], 0.01), "critic": layers(second, [*widths, 1], 1.0)}
        obs, state = jax.vmap(world.reset)(jax.random.split(begun, copies))
        carry = ((weights, rule.init(weights)), state, obs, jnp.zeros(copies), key)
        _, means = jax.lax.scan(update, carry, None, options.updates)
        return means

    return train


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--task", choices=WORLDS, required=True)
    for name in ("copies", "steps", "minibatches", "updates"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=2.5e-4)
    parser.add_argument("--decay", action="store_true")
    parser.add_argument("--entropy", type=float, default=0.01)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    begun = time.perf_counter()
    compiled = jax.jit(trainer(WORLDS[options.task](), options)).lower(jax.random.PRNGKey(options.seed)).compile()
    compiling = time.perf_counter() - begun
    begun = time.perf_counter()
    means = compiled(jax.random.PRNGKey(options.seed)).block_until_ready()
    seconds = time.perf_counter() - begun
    steps = options.updates * options.copies * options.steps
    packages = {name: version(name) for name in ("jax", "jaxmarl", "gymnax", "optax")}
    print(
        json.dumps(
            {
                "compile_seconds": compiling,
                "seconds": seconds,
                "steps": steps,
                "steps_per_second": steps / seconds,
                "returns": [None if math.isnan(mean) else round(mean, 3) for mean in map(float, means)],
                "packages": packages,
            }
        )
    )


if __name__ == "__main__":
    main()
