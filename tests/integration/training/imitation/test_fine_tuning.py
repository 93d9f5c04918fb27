"""Language models that begin with demonstrations write what was demonstrated."""

import json
from pathlib import Path

import pytest
import torch
from toys.texts import TWO_AGENTS, TWO_POLICIES, config

from marl_ray.envs.registry import make_env
from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.language.tiny_models import byte_tokenizer, tiny_model
from marl_ray.rollout.text.episode import TextEpisode
from marl_ray.training.collectives import worker_mesh
from marl_ray.training.errors import PassMemoryError
from marl_ray.training.evaluation.held_out import solved_shares
from marl_ray.training.imitation.fine_tuning import fine_tune
from marl_ray.training.run_checks import check_run
from marl_ray.training.single_process import train_alone
from marl_ray.training.team.assembly import build_team, team_agents
from marl_ray.training.texts.demonstrations import encode_examples, read_demonstrations

pytestmark = pytest.mark.usefixtures("alone")

TUNED = "warm_start={data: environment, count: 64, batch: 16, epochs: 8, lr: 0.003}"


def test_a_tuned_team_writes_what_was_demonstrated(tmp_path):
    """A run that is nothing but a warm start leaves a checkpoint, a bundle and a score on held-out tasks."""
    rows = train_alone(config(TWO_AGENTS, TWO_POLICIES, TUNED, "train.total_steps=0", "evaluation.every=1"), tmp_path)
    *epochs, last = rows
    assert [row["warm_start/epoch"] for row in epochs] == list(range(1, 9))
    for name in ("first", "second"):
        likelihoods = [row[f"{name}/warm_start/log_likelihood"] for row in epochs]
        assert likelihoods == sorted(likelihoods) and likelihoods[-1] > -0.2
    assert last["eval/greedy"] == 1 and last["eval/pass_at_1"] == 1
    assert [last[f"eval/return/{name}"] for name in ("first", "second")] == pytest.approx([1.1, 1.1])
    bundle = load_bundle(tmp_path / "0" / "bundle")
    assert bundle.agents == {"a": "first", "b": "second"}

    # The bundle is a start for another run, which continues where it ends; a frozen policy stays as it is.
    team = json.loads(json.dumps(config(TWO_POLICIES).model_dump(exclude_unset=True)["team"]))
    for name in team:
        team[name] |= {"bundle": str(tmp_path / "0" / "bundle"), "frozen": name == "second"}
    more = [f"team={json.dumps(team)}", "train.total_steps=16", "hyper.entropy_coef=0.1"]
    rows = train_alone(config(TWO_AGENTS, *more), tmp_path / "more")
    assert rows[0]["a/reward"] > 0.9 and rows[0]["env/solved"] > 0.9
    again = load_bundle(tmp_path / "more" / "1" / "bundle").manifest.policies
    assert again["second"].files == bundle.manifest.policies["second"].files
    assert again["first"].files != bundle.manifest.policies["first"].files


def test_micro_batches_change_nothing():
    rows = [
        train_alone(config(TUNED.replace("epochs: 8", "epochs: 2"), "train.total_steps=0", f"train.micro_batch={size}"))
        for size in ("null", "5")
    ]
    for a, b in zip(*rows, strict=True):
        assert a == pytest.approx(b, abs=1e-5)


def test_a_pass_of_a_warm_start_without_memory_is_named():
    run = config(TUNED, "train.micro_batch=4")
    env = make_env(run.env, run.constraints)
    team = build_team(run, env, worker_mesh("cpu"), False)

    def refuse(*arguments: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    team.learners["speaker"].policy.model.lm.get_decoder().register_forward_pre_hook(refuse)
    message = (
        r"^policy 'speaker', warm start, epoch 1: out of memory in a pass of 4 sequences; expected a smaller train\.mic"
    )
    with pytest.raises(PassMemoryError, match=message) as refused:
        fine_tune(run, env, team, lambda row: None)
    assert (refused.value.policy, refused.value.rows) == ("speaker", 4)


def test_adapters_are_tuned_and_the_model_below_them_is_not(tmp_path):
    lora = "team.speaker.model={preset: tiny-0.2m, context: 32, lora: {rank: 4}}"
    rows = train_alone(config(lora, TUNED, "hyper.lr=0.01", "train.total_steps=8"), tmp_path)
    epochs = [row["warm_start/log_likelihood"] for row in rows if "iteration" not in row]
    assert epochs[-1] > epochs[0] + 0.1


def write_data(folder: Path, *lines: object) -> str:
    path = folder / "data.jsonl"
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


GOOD = {"prompt": "a", "response": "a", "agent": "a"}


@pytest.mark.parametrize(
    ("lines", "message"),
    [
        ([], "has no demonstration for policy 'first'"),
        ([GOOD], "has no demonstration for policy 'second'"),
        ([GOOD, {"prompt": "a", "response": "a"}], r"data.jsonl:2: agent: expected one of a, b"),
        ([GOOD | {"agent": "c"}], r"data.jsonl:1: agent 'c' is not one of a, b"),
        ([GOOD, "{"], r"data.jsonl:2: not JSON"),
        (
            [GOOD, {"prompt": "a", "answer": "a"}],
            r"data.jsonl:2: unknown key 'answer'; expected one of prompt, response",
        ),
        ([GOOD | {"response": 1}, GOOD], r"data.jsonl:1: response: expected text"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path, lines, message):
    run_config = config(
        TWO_AGENTS, TWO_POLICIES, f"warm_start.data={write_data(tmp_path, *lines)}", "train.total_steps=0"
    )
    env = make_env(run_config.env)
    with pytest.raises(MarlRayError, match=message) as caught:
        read_demonstrations(run_config, env, team_agents(run_config, env))
    assert "\n" not in str(caught.value)


def test_lines_of_a_file_become_examples(tmp_path):
    lines = [GOOD, {"prompt": "bb", "response": "xyz"}, GOOD | {"response": "four"}]
    run_config = config(f"warm_start={{data: {write_data(tmp_path, *lines)}, count: 2}}", "train.total_steps=0")
    env, tokenizer = make_env(run_config.env), byte_tokenizer(32)
    lm = tiny_model("tiny-0.2m", tokenizer, 32)
    examples = read_demonstrations(run_config, env, team_agents(run_config, env))["speaker"]
    end = tokenizer.eos_token_id
    assert [example.response for example in encode_examples(examples, lm, tokenizer, run_config, "speaker")] == [
        [97, end],
        [*b"xyz", end],
    ]
    examples = read_demonstrations(
        run_config.model_copy(update={"warm_start": run_config.warm_start.model_copy(update={"count": 3})}),
        env,
        team_agents(run_config, env),
    )["speaker"]
    with pytest.raises(MarlRayError, match=r"data.jsonl:3: response of 5 tokens, but .*max_tokens=4"):
        encode_examples(examples, lm, tokenizer, run_config, "speaker")


TEAM = "team={speaker: {model: {preset: tiny-0.2m, context: 32}, generation: {max_tokens: 4}}}"


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["env.id=toys.envs:countdown"], "env.id: toys.envs:countdown is no text environment"),
        (["team={x: {agents: [z], model: {preset: tiny-1m}}}"], "team: no policy plays agent 'a'"),
        (["team.speaker.model.context=4"], "team.speaker: the first prompt: 2 tokens and .*max_tokens=4 exceed"),
        (["team.speaker.model={path: /no/such}"], "model.path '/no/such'"),
        (["team.speaker.model={preset: tiny-0.2m, lora: {targets: [nothing]}}"], "no .*layer is named 'nothing'"),
        (["team.speaker.bundle=/no/such"], "bundle '/no/such' has no readable bundle.json"),
        (["train.curriculum=nothing"], "train.curriculum=nothing: expected easiest_first"),
        (["warm_start.data=/no/such.jsonl"], "/no/such.jsonl: cannot be read"),
        (["algorithm=p3o", "constraints=[{budget: 1}]"], "constraints: the environment reports no infos"),
    ],
)
def test_what_cannot_work_is_refused_before_a_cluster_starts(tmp_path, overrides, message):
    with pytest.raises(MarlRayError, match=message) as caught:
        check_run(config(f"storage={tmp_path}", *overrides))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("to", "read"), [("a", 0), ("b", 1)])
@pytest.mark.parametrize("algorithm", ["grpo", "ppo"])
def test_a_run_of_prompts_that_nobody_can_read_ends(algorithm, to, read):
    env = f"env={{id: 'toys.texts:wordy', kwargs: {{agents: [a, b], to: {to}}}}}"
    held_out = "evaluation={every: 3, tasks: 2, samples: 2}"
    rows = train_alone(config(env, TWO_POLICIES, held_out, f"algorithm={algorithm}"))
    assert len([row for row in rows if "iteration" in row]) >= 3
    last = [row for row in rows if f"{to}/prompt_too_long" in row][-1]
    assert last[f"{to}/prompt_too_long"] == 1 and "env/solved" not in last
    assert ("a/response_tokens" in last) == bool(read) and "b/response_tokens" not in last


def test_a_truncated_episode_counts_as_unsolved():
    def episode(solved, truncated):
        return TextEpisode(0, 0, 0.0, (), 1, 0, 0, solved, 1, truncated, {}, {}, {})

    episodes = [episode(True, False), episode(None, True), episode(False, False), episode(None, True)]
    assert solved_shares(episodes, [episode(None, True)], 2) == {"greedy": 0.0, "pass_at_1": 0.25, "pass_at_2": 0.5}
    assert solved_shares([episode(None, True)] * 2, [], 2) == {}
    assert solved_shares([episode(None, False), episode(True, False)], [], 2) == {}
