"""Runs that learn from texts that were served, and from nothing else."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from toy_runs.runs import timeless
from toy_serving.gateways import serving
from toy_serving.logged_texts import served_row, write_served
from toy_serving.text_gateways import make_text_bundle, post, text_config
from toys.texts import config

from marl_ray.algorithms import algorithm_of
from marl_ray.algorithms.advantages.value_norm import ValueNorm
from marl_ray.config import SPECS, EnvConfig, RunConfig, load_config
from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.evaluation.off_policy.texts import estimate_text_outcome
from marl_ray.policies.bundles.language import TokenBundle
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.base import Prompt
from marl_ray.policies.engines.torch_engine import TorchEngine
from marl_ray.policies.prompting.prompts import encode_prompt
from marl_ray.rollout.protocol import CollectPlan
from marl_ray.rollout.served.collector import ServedCollector, ServedResponse
from marl_ray.rollout.served.texts import exported_file
from marl_ray.rollout.text.responses import TokenPlayer
from marl_ray.serving.logs.export import export
from marl_ray.training.run_checks import check_run
from marl_ray.training.single_process import train_alone
from marl_ray.training.texts.served_data import preferred_pairs
from marl_ray.tuning.search.metric_names import metric_names

pytestmark = pytest.mark.usefixtures("alone")

CONTEXT = 32


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_text_bundle(tmp_path_factory.mktemp("bundle"), 1, context=CONTEXT)


def good(ids: list[int]) -> float:
    """The reward of a response: 1 if its first token is an even one."""
    return float(ids[0] % 2 == 0)


def chance_of_good(bundle: str | Path, prompt: str) -> float:
    loaded = load_bundle(bundle)
    assert isinstance(loaded, TokenBundle)
    (policy,) = (loaded.policies[name] for name in loaded.policies)
    ids = torch.arange(policy.lm.config.vocab_size)
    read = torch.tensor([encode_prompt(policy.tokenizer, prompt, None)] * len(ids))
    with torch.no_grad():
        log_probs = policy.evaluate(read, ids[:, None], torch.ones(len(ids), 1, dtype=torch.bool)).log_probs
    return float(log_probs[::2].exp().sum())


def serve(folder: Path, bundle: str, count: int, prompts: tuple[str, ...] = ("hello", "so"), **columns: Any) -> str:
    """The bundle's responses to these prompts in turn, as an export would have it; the run's `data`."""
    policy = load_bundle(bundle).policies["lm"]
    generation = policy.generation.model_copy(update={"max_tokens": 2})
    read = [encode_prompt(policy.tokenizer, prompts[k % len(prompts)], None) for k in range(count)]
    written = TorchEngine(policy).generate([Prompt(tuple(ids), k) for k, ids in enumerate(read)], 0, generation)
    rows = [
        served_row(
            f"u{k:05}", ids, reply.ids, reply.log_probs, good(reply.ids), policy.tokenizer, generation, **columns
        )
        for k, (ids, reply) in enumerate(zip(read, written, strict=True))
    ]
    write_served(folder / "e.parquet", rows)
    return f"decisions://{folder}/e"


def learn(bundle: str, data: str, *overrides: str) -> Any:
    policy = {"model": {"preset": "tiny-0.2m", "context": CONTEXT}, "bundle": bundle}
    policy["generation"] = {"max_tokens": 12, "temperature": 0.8}
    team = f"team={json.dumps({'speaker': policy})}"
    env = "env={id: 'toys.texts:echo', kwargs: {agents: [writer]}}"
    size = ["train.group_size=1", "train.env_copies=16", "train.total_steps=256", "hyper.lr=0.003"]
    return config(env, team, *size, f"data={data}", *overrides)


def collector(data: dict[str, list[Any]], state: dict[str, Any] | None = None) -> ServedCollector:
    def make() -> Any:
        return make_env(EnvConfig(id="toys.texts:echo", kwargs={"agents": ["writer"]}), ())

    plan = CollectPlan(1, True)
    return ServedCollector(make, {"speaker": ["writer"]}, range(1), plan, 0, 0, state, lambda share: [share], data, 16)


@pytest.fixture(scope="module")
def data(bundle: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    return serve(tmp_path_factory.mktemp("served"), bundle, 256, ("hello",))


@pytest.mark.parametrize(
    "algorithm",
    ["grpo", "dpo", *(pytest.param(name, marks=pytest.mark.long) for name in ("rloo", "reinforce_pp", "gspo"))],
)
def test_a_run_learns_from_what_was_served(tmp_path, bundle, data, algorithm):
    lr = ["hyper.beta=0.5"] if algorithm == "dpo" else []
    run = learn(bundle, data, f"algorithm={algorithm}", *lr)
    last = train_alone(run, tmp_path / "run")[-1]
    writer = {f"writer/{name}" for name in ("reward", "response_tokens", "ended")}
    assert {*last} - writer == {name for name in metric_names(run) if not name.startswith(("eval/", "best/"))}
    assert last["data/speaker/passes"] >= 1 and all(np.isfinite(list(last.values())))
    assert 0.2 < last["writer/reward"] < 0.8 and last["writer/response_tokens"] > 1.9
    after = chance_of_good(tmp_path / "run" / str(last["iteration"]) / "bundle", "hello")
    assert after > chance_of_good(bundle, "hello") + 0.1


def test_ratios_are_to_the_chances_with_which_a_text_was_written(tmp_path, bundle):
    """Those of an arm far from the policy are clipped away; those of the policy itself begin at one."""
    data = serve(tmp_path, bundle, 64)
    still = ["hyper.lr=1e-30", "algorithm=reinforce_pp", "train.total_steps=64", "train.env_copies=64"]
    (row,) = train_alone(learn(bundle, data, *still))
    assert row["kl"] == pytest.approx(0, abs=1e-5) and row["clip_fraction"] == 0
    far = make_text_bundle(tmp_path, 9, context=CONTEXT)
    (other,) = train_alone(learn(far, data, *still))
    assert other["kl"] > 0.1 and other["clip_fraction"] > 0.1
    # Also where the learner computes otherwise than the arm did.
    (coarse,) = train_alone(learn(far, data, *still, "resources.mixed_precision=bf16"))
    assert coarse["kl"] == pytest.approx(other["kl"], rel=0.1)


def test_a_resumed_run_reads_on_and_refuses_other_data(tmp_path, bundle):
    data = serve(tmp_path, bundle, 100)
    run = learn(bundle, data, "algorithm=rloo", "train.env_copies=16", "train.total_steps=160")
    uninterrupted = train_alone(run, tmp_path / "run")
    assert len(uninterrupted) == 7 and uninterrupted[3]["steps"] == 100  # two of eight groups of 12 and 13 at a time
    again = train_alone(run, resume=tmp_path / "run" / "3")
    assert timeless(again) == timeless([row for row in uninterrupted if row["iteration"] > 3])
    serve(tmp_path, bundle, 99)
    with pytest.raises(MarlRayError, match=r"^data: is not what this run began to learn from"):
        train_alone(run, resume=tmp_path / "run" / "3")


def test_a_checkpoint_of_a_run_that_played_is_refused():
    block = (
        ServedResponse("writer", np.zeros(1, np.int32), np.zeros(1, np.int32), np.zeros(1, np.float32), 0.0, True),
    )
    with pytest.raises(MarlRayError, match=r"^data: is not what this run began to learn from"):
        collector({"speaker": [block]}, {"position": 3})


def test_a_group_is_a_block_whichever_worker_has_it(bundle):
    """Two parts of the responses to one prompt are two groups, as they are where two workers have them."""
    policy = load_bundle(bundle).policies["lm"]
    player = TokenPlayer(policy, TorchEngine(policy), ["writer"], ValueNorm())
    prompt, ids = np.array([5, 6], np.int32), np.array([7], np.int32)
    blocks = [
        tuple(ServedResponse("writer", prompt, ids, np.zeros(1, np.float32), reward, True) for reward in rewards)
        for rewards in ((0.0, 1.0), (1.0, 1.0, 4.0))
    ]
    batch = collector({"speaker": blocks}).collect({"speaker": player}, 0).trajectories["speaker"]
    raw, _ = algorithm_of("rloo").advantages(batch, SPECS["rloo"].hyper.model_validate(SPECS["rloo"].defaults))
    assert sorted(raw[:, 0].tolist()) == pytest.approx([-1.5, -1.5, -1.0, 1.0, 3.0])


@pytest.mark.parametrize("place", ["loss", "reward"])
def test_the_divergence_from_the_reference_is_the_learners_own(tmp_path, bundle, place):
    """The arm that wrote keeps its own, which no learning changes."""
    data = serve(tmp_path, make_text_bundle(tmp_path, 9, context=CONTEXT), 16)
    held = ["algorithm=reinforce_pp", "hyper.kl_coef=0.01", f"hyper.kl_place={place}", "hyper.lr=0.01"]
    first, second = train_alone(learn(bundle, data, *held, "train.total_steps=32"))
    assert first["reference_kl"] == pytest.approx(0, abs=1e-5) and second["reference_kl"] > 1e-3


def test_only_texts_with_known_chances_are_learned_from(tmp_path, bundle):
    data = serve(tmp_path, bundle, 8, sampled=False)
    with pytest.raises(MarlRayError, match="no response of policy 'speaker' that was drawn"):
        train_alone(learn(bundle, data, "algorithm=reinforce_pp"))
    rows = train_alone(learn(bundle, data, "algorithm=dpo", "train.total_steps=4"))  # which needs none
    assert np.isfinite(rows[0]["policy_loss"])


def test_what_does_not_fit_is_said_before_a_run(tmp_path, bundle):
    data = serve(tmp_path, bundle, 4, prompts=("a", "b", "c", "d"))
    no_env = f"storage={tmp_path}"
    wrong = {
        "expected two responses to one prompt; reinforce_pp compares": (data, "algorithm=rloo"),
        "expected two responses to one prompt with different outcomes": (data, "algorithm=dpo"),
        "e.parquet: expected a Parquet file": (data.replace("/e", "/other/e"), "algorithm=rloo"),
        "expected decisions://FOLDER/EXPERIMENT": ("decisions://e", "algorithm=rloo"),
    }
    for message, (given_data, algorithm) in wrong.items():
        with pytest.raises(MarlRayError) as caught:
            check_run(learn(bundle, given_data, algorithm, no_env))
        assert message in str(caught.value), message
    refused = {
        "data: ppo of policy 'speaker' needs local critic": ["algorithm=ppo"],
        "data: remax of policy 'speaker' needs": ["algorithm=remax"],
        "dynamic_sampling of policy 'speaker'": ["algorithm=dapo", "hyper.dynamic_sampling=2"],
        "importance_cap of policy 'speaker': the loss's own ratio": ["algorithm=rloo", "hyper.importance_cap=2"],
    }
    for message, overrides in refused.items():
        with pytest.raises(MarlRayError) as caught:
            learn(bundle, data, *overrides)
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("data", "path"),
    [
        ("decisions://exported/solver", "exported/solver.parquet"),
        ("decisions:///var/exported/solver", "/var/exported/solver.parquet"),
        ("decisions://s3://bucket/texts/solver", "s3://bucket/texts/solver.parquet"),
        (
            "decisions://s3://b/solver?endpoint_override=h:1&scheme=http",
            "s3://b/solver.parquet?endpoint_override=h:1&scheme=http",
        ),
    ],
)
def test_decisions_are_where_export_put_them(data, path):
    assert exported_file(data) == path


@given(st.lists(st.sampled_from([0.0, 0.5, 1.0]), min_size=1, max_size=9))
def test_pairs_are_of_different_outcomes_and_of_different_responses(rewards):
    nothing = np.zeros(1, np.int32)
    group = [ServedResponse("a", nothing, nothing + k, nothing, reward, True) for k, reward in enumerate(rewards)]
    pairs = preferred_pairs(group)
    assert all(better.reward > worse.reward for better, worse in pairs)
    used = [int(example.ids[0]) for pair in pairs for example in pair]
    assert len(used) == len(set(used))
    assert bool(pairs) == (len(set(rewards)) > 1)


async def test_from_requests_over_parquet_to_a_run_that_learns_from_the_outcomes(tmp_path, bundle):
    """Serve, report outcomes, export, estimate, train: each by what users have."""
    logging = text_config({"one": bundle}, tmp_path, decision_log=str(tmp_path / "log"))

    async with serving(logging) as (client, app):

        async def served(k: int) -> None:
            body = {"session_id": f"s{k}", "prompt": "hello", "max_tokens": 2}
            answer = await post(client, "/generate", body)
            await post(client, "/v1/outcomes", {"session_id": f"s{k}", "value": good(answer["tokens"])})

        for begin in range(0, 128, 16):
            await asyncio.gather(*(served(k) for k in range(begin, begin + 16)))
        await asyncio.to_thread(app.service.acts.close)
        summary = export(
            app.service.stores.experiments,
            app.service.stores.units,
            "exp",
            logging.decision_log,
            str(tmp_path / "exported"),
        )
    assert (summary.units, summary.sequences) == (128, 128)
    data = f"decisions://{tmp_path}/exported/exp"
    check_run(learn(bundle, data, "algorithm=rloo", f"storage={tmp_path}"))
    rows = train_alone(learn(bundle, data, "algorithm=rloo", "train.total_steps=256"), tmp_path / "run")
    after = tmp_path / "run" / str(rows[-1]["iteration"]) / "bundle"
    assert chance_of_good(after, "hello") > chance_of_good(bundle, "hello") + 0.1
    # Seen from the log, too, it earns more than what was served.
    judged = estimate_text_outcome(load_bundle(after), summary.path, floor=0.0)
    assert judged.value.estimate > judged.logged + 0.05


@pytest.mark.parametrize("name", ["served_texts", "preferences_dpo"])
def test_the_configs_in_the_repository_run(name, tmp_path, monkeypatch):
    root = Path(__file__).parents[4]
    monkeypatch.chdir(root)
    short = ["train.total_steps=16", "train.env_copies=8", "evaluation.tasks=4", f"storage={tmp_path}"]
    start = make_text_bundle(tmp_path, 1, {"solver": "lm"}, context=CONTEXT)
    short += [f"team.solver.bundle={start}", "team.solver.model.preset=tiny-0.2m"]
    if name == "served_texts":
        short += [f"data={serve(tmp_path, start, 16, ('3-2=',), agent='solver')}"]
    run = load_config(RunConfig, root / f"jobs/configs/{name}.yaml", short)
    check_run(run)
    last = train_alone(run)[-1]
    assert last["steps"] >= 16 and "eval/return" in last and "data/solver/passes" in last
