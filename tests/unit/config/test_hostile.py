"""Values of every wrong kind, in every section of every config: one line that names the key, in words of this product."""

import re

import pytest
import yaml

from marl_ray.config import ExperimentConfig, RunConfig, parse_config
from marl_ray.config.cluster import ClusterConfig
from marl_ray.config.serving.gateway import GatewayConfig
from marl_ray.config.sweep import SweepConfig
from marl_ray.errors import MarlRayError

RUN = {"name": "r", "env": {"id": "budget_dag"}}
SWEEP = {"name": "s", "run": RUN, "space": {"hyper.lr": {"grid": [0.1, 0.2]}}}
ARMS = "experiments.0.arms.a"
HUGE = "1" + 400 * "0"
"""A whole number above the largest float."""
CLUSTER = {"name": "c", "image": "a/b:1", "groups": {"w": {"cpus": 1, "memory": "1Gi"}}}
LIBRARY_WORDS = re.compile(
    r"Input should|should have|should match|\[type=|pydantic|Value error|function-|tagged|union|\[key\]|nullable"
    r"|\.str\b|constrained|Unable to|Field required|Extra inputs|valid (string|integer|number|boolean|list|tuple|dict)"
)

HOSTILE = {
    RunConfig: (
        RUN,
        {
            "name: [a]": "name: expected text",
            "storage: ''": "storage: expected a text that is not empty, got ''",
            "algorithm: {a: 1}": "algorithm: expected text",
            "env: []": "env: expected a mapping of keys",
            "env: {id: 3}": "env.id: expected text, got 3",
            "env: {kwargs: {}}": "missing key 'env.id'",
            "env: {id: budget_dag, cost: {action: x}}": "env.cost.action: expected a number",
            "hyper: [lr]": "hyper: expected a mapping of keys",
            "hyper: {lr: .inf}": "hyper.lr: expected a finite number",
            "hyper: {lr: 0}": "hyper.lr: expected a number greater than 0, got 0",
            "hyper: {gamma: 2}": "hyper.gamma: expected a number of at most 1, got 2",
            "hyper: {lr: true}": "hyper.lr: expected a number, got True",
            "hyper: {epochs: 1.5}": "hyper.epochs: expected a whole number, got 1.5",
            "hyper: {adam_betas: [1]}": "hyper.adam_betas",
            "hyper: {adam_betas: [0.9, on]}": "hyper.adam_betas.1: expected a number, got True",
            "hyper: {std_ddof: yes}": "hyper.std_ddof: expected a whole number, got True",
            "hyper: {std_ddof: 2}": "hyper.std_ddof: expected 0 or 1, got 2",
            "hyper: {optimizer: adm}": "hyper.optimizer: expected 'adamw' or 'sgd', got 'adm'; did you mean adamw",
            "train: {overlap: maybe}": "train.overlap: expected true or false, got 'maybe'",
            "train: {total_steps: yes}": "train.total_steps: expected a whole number, got True",
            "train: {env_copies: [3]}": "train.env_copies: expected a whole number",
            "team: {a: {agents: 3}}": "team.a.agents: expected a list, got 3",
            "team: {a: {agents: ['*'], network: {hidden: [x]}}}": "team.a.network.hidden.0: expected a whole number",
            "team: {a: {agents: ['*'], model: {preset: 3}}}": "team.a.model.preset: expected",
            "team: {a: {agents: ['*'], generation: {stop: 3}}}": "team.a.generation.stop: expected a list, got 3",
            "constraints: [3]": "constraints.0: expected a mapping of keys, got 3",
            "evaluation: {episodes: 0}": "evaluation.episodes: expected a number greater than 0, got 0",
            "evaluation: {episodes: off}": "evaluation.episodes: expected a whole number, got False",
            "evaluation: {benchmarks: [3]}": "evaluation.benchmarks.0: expected",
            "resources: {device: gpu}": "'auto', 'cpu' or 'cuda', got 'gpu'; did you mean cuda?",
            "resources: {workers: yes}": "resources.workers: expected a whole number, got True",
            "resources: {mixed_precision: x}": "resources.mixed_precision: expected 'auto'",
            "resources: {parallel: 3}": "resources.parallel: expected a mapping of keys, got 3",
            "tracking: {also: 3}": "tracking.also: expected a list, got 3",
            "warm_start: {data: 3}": "warm_start.data: expected text, got 3",
            "data: {path: 3}": "data",
        },
    ),
    SweepConfig: (
        SWEEP,
        {
            "run: [x]": "run: expected a mapping of keys",
            "space: {}": "space: expected a length of at least 1",
            "space: {hyper.lr: [1, 2]}": "space.hyper.lr: expected a mapping of keys",
            "space: {hyper.lr: {uniform: [a, b]}}": (
                "space.hyper.lr.uniform.0: expected a number, got 'a' (and 1 more: space.hyper.lr.uniform.1)"
            ),
            "space: {hyper.lr: {uniform: [1]}}": "space.hyper.lr.uniform",
            "space: {hyper.lr: {int: [1.5, 2]}}": "space.hyper.lr.int.0: expected a whole number, got 1.5",
            "seeds: [true]": "seeds.0: expected a whole number, got True",
            "search: tpee": "search.kind: expected 'grid', 'random' or 'tpe', got 'tpee'; did you mean tpe",
            "scheduler: 3": "scheduler",
            "scheduler: []": "scheduler",
            "scheduler: {grace: 3}": "scheduler: expected the key 'kind'",
            "scheduler: {kind: [a]}": "scheduler: expected 'kind' to be one of 'fifo', 'asha', 'median', 'pbt', 'pb2'",
            "scheduler: {kind: asha}": "missing key 'scheduler.grace'",
            "scheduler: {kind: asha, grace: 0}": "scheduler.grace: expected a number greater than 0, got 0",
            "scheduler: {kind: ashaa, grace: 9}": "scheduler: 'ashaa' is unknown; did you mean asha",
            "scheduler: {kind: pbt, interval: 9, factors: [1]}": "scheduler.factors",
            "scheduler: {kind: pbt, interval: 9, factors: [1, -1]}": "scheduler.factors.1: expected a number greater",
            "scheduler: {kind: median, grace: 9, min_trails: 3}": "'scheduler.min_trails'; did you mean scheduler.min_",
            "seeds: [a]": "seeds.0: expected a whole number, got 'a'",
            "scheduler: asha": "missing key 'scheduler.grace'",
            "metric: {nmae: x}": "unknown key 'metric.nmae'; did you mean metric.name or metric.mode?",
            "metric: {mode: maximum}": "metric.mode: expected 'max' or 'min', got 'maximum'; did you mean max",
            "budget: {hours: -1}": "budget.hours: expected a number greater than 0, got -1",
            "search: {seed: 4294967296}": "search.seed: expected a number of at most 4294967295, got 4294967296",
            f"seeds: {HUGE}": "seeds: expected a length of at most 1000",
            "seeds: 1000000000000": "seeds: expected a length of at most 1000",
            "space: {hyper.minibatches: {int: [1, 9007199254740992]}}": (
                "space.hyper.minibatches.int.1: expected a number of at most 9007199254740991, got 9007199254740992"
            ),
            "space: {hyper.minibatches: {int: [-9007199254740992, 1]}}": (
                "space.hyper.minibatches.int.0: expected a number of at least -9007199254740991"
            ),
            f"space: {{hyper.minibatches: {{int: [1, {HUGE}]}}}}": "space.hyper.minibatches.int.1: expected a number of",
            "space: {hyper.gamma: {uniform: [-1.7e+308, 1]}}": (
                "space.hyper.gamma.uniform.0: expected a number of at least -1e+100, got -1.7e+308"
            ),
            "space: {hyper.lr: {loguniform: [1, 1.7e+308]}}": (
                "space.hyper.lr.loguniform.1: expected a number of at most 1e+100, got 1.7e+308"
            ),
        },
    ),
    ExperimentConfig: (
        {"name": "e", "arms": {"a": {"bundle": "x"}}},
        {
            f"population: {{attributes: {{age: [{HUGE}]}}}}": "population.attributes.age.0: expected a boolean, a number",
            f"margin: {HUGE}": "margin: expected a number of 0 or more",
            f"bounds: [0, {HUGE}]": "bounds: expected [low, high] with low < high",
        },
    ),
    GatewayConfig: (
        {},
        {
            "experiments: 3": "experiments: expected a list, got 3",
            "experiments: [{name: x, arms: {a: 3}}]": f"{ARMS}: expected a mapping of keys, got 3",
            "experiments: [{name: x, arms: {a: {url: x}}}]": f"{ARMS}.url: expected an address such as http",
            "experiments: [{name: 'a b', arms: {a: {bundle: x}}}]": "experiments.0.name: expected letters, digits",
            "experiments: [{name: x, arms: {a: {bunlde: x}}}]": f"'{ARMS}.bunlde'; did you mean {ARMS}.bundle",
            "cors: [x]": "cors.0: expected * or an origin",
            "holdouts: {a b: 0.1}": "holdouts.a b: expected letters, digits",
            "holdouts: {a: yes}": "holdouts.a: expected a number, got True",
            "holdouts: {a: 2}": "holdouts.a: expected a number less than 1, got 2",
        },
    ),
    ClusterConfig: (
        CLUSTER,
        {
            "image: ''": "image: expected",
            "groups: {w: {memory: x, cpus: 1}}": "groups.w.memory: expected",
            "groups: {w: {memory: 1Gi, cpus: yes}}": "groups.w.cpus: expected a number, got True",
            "groups: {w: {cpuss: 1}}": "'groups.w.cpuss'; did you mean groups.w.cpus",
            "ray_version: 2.x": "ray_version: expected",
            "redis: {address: ''}": "redis.address: expected",
            "head: 3": "head: expected a mapping of keys, got 3",
        },
    ),
}
CASES = [(model, base, text, words) for model, (base, cases) in HOSTILE.items() for text, words in cases.items()]


@pytest.mark.parametrize(
    ("model", "base", "text", "words"), CASES, ids=[f"{m.__name__}: {t[:70]}" for m, _, t, _ in CASES]
)
def test_a_value_of_a_wrong_kind_is_one_line_in_our_words(model, base, text, words):
    with pytest.raises(MarlRayError) as refused:
        parse_config(model, base | yaml.safe_load(text), source="f.yaml")
    line = str(refused.value)
    assert line.startswith("f.yaml: ") and words in line
    assert "\n" not in line and not LIBRARY_WORDS.search(line)
