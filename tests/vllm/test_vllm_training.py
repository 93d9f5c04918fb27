"""Runs whose responses vLLM writes."""

from toys.texts import TWO_AGENTS, config, trained

from marl_ray.training.single_process import train_alone

ENGINE = "team.speaker.generation.engine=vllm"
EXACT = 1e-5
"""Greatest difference of log-probabilities in float32."""


def test_the_learner_computes_the_engines_log_probs_in_every_iteration_of_a_team():
    team = (
        "team={first: {agents: [a], model: {preset: tiny-0.2m, context: 32}, generation: {max_tokens: 4, engine: vllm}}, "
        "second: {agents: [b], model: {preset: tiny-0.2m, context: 32, lora: {rank: 4}}, generation: {max_tokens: 3, "
        "engine: vllm}}}"
    )
    rows = train_alone(config(TWO_AGENTS, team, "train.total_steps=48", "hyper.lr=0.01"))
    gaps = [row[f"{name}/engine/log_prob_gap"] for row in rows for name in ("first", "second") if row["iteration"]]
    assert len(gaps) == 6 and max(gaps) < EXACT


def test_a_run_goes_on_from_its_checkpoint_with_the_weights_of_the_checkpoint(tmp_path):
    whole = trained(str(tmp_path), ENGINE)
    rest = train_alone(config(ENGINE), resume=tmp_path / "2")
    assert [row["iteration"] for row in rest] == [3]
    for name in ("return", "policy_loss", "entropy", "tokens"):
        assert abs(rest[-1][name] - whole[-1][name]) < 1e-4, name


def test_bfloat16_is_weighed_by_truncated_importance():
    rows = train_alone(config(ENGINE, "team.speaker.model.dtype=bf16"))
    assert all(0 < row["engine/log_prob_gap"] < 0.1 for row in rows)


def test_benchmarks_are_measured_by_vllm_and_leave_training_as_it_is(tmp_path):
    (tmp_path / "m.jsonl").write_text('{"prompt": "a", "answer": "a"}\n{"prompt": "b", "answer": "b"}\n')
    entry = f"{{name: math, data: '{tmp_path / 'm.jsonl'}', samples: 2, temperature: 0.7, every: 1}}"
    measured = train_alone(config(ENGINE, f"evaluation.benchmarks=[{entry}]"))
    assert [row["iteration"] for row in measured if "benchmark/math/pass_at_2" in row] == [0, 1, 2, 3]
    plain = train_alone(config(ENGINE))
    for name in ("return", "policy_loss", "entropy", "tokens"):
        assert abs(measured[-1][name] - plain[-1][name]) < 1e-4, name
