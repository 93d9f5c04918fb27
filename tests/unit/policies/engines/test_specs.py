"""The spec of an engine of a user's own opens what the built-in engines can do."""

import asyncio

import pytest
from toy_serving.text_gateways import make_text_bundle

from marl_ray.config import ArmConfig, RunConfig, engine_spec
from marl_ray.config.run.engines import ENGINES
from marl_ray.config.run.model import DEFAULT_ENGINE
from marl_ray.errors import FieldError, MarlRayError
from marl_ray.extensions import ENGINE, import_reference
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.engines.decoding.logit_bias import LogitBias
from marl_ray.serving.arms.protocol import TextRequest
from marl_ray.serving.arms.text.batcher import TextBatcher
from marl_ray.training.machines.ray_variables import exchange_s

PLAIN = "toys.engines:Plain"


def run_of(engine: str, rank: int | None = None, **changes: object) -> RunConfig:
    model = {"preset": "tiny-0.2m", "context": 64} | ({} if rank is None else {"lora": {"rank": rank}})
    team = {"solver": {"model": model, "generation": {"engine": engine}}}
    config = {"name": "r", "algorithm": "grpo", "env": {"id": "math"}, "team": team, "train": {"group_size": 2}}
    return RunConfig.model_validate(config | changes)


@pytest.mark.parametrize("name", ENGINE.builtins)
def test_a_built_in_class_has_the_spec_that_configs_read(name):
    assert ENGINE.load(name).spec is ENGINES[name]
    for reference in (ENGINES[name].host, ENGINES[name].server):
        assert reference is None or callable(import_reference(reference))


def test_all_but_the_built_in_decoder_need_a_start():
    """Also an engine of a user's own, of which nobody knows better."""
    assert [name for name in (*ENGINES, PLAIN) if not engine_spec(name).needs_start] == [DEFAULT_ENGINE]


def test_a_spec_decides_about_actors_adapters_and_patience(monkeypatch):
    monkeypatch.delenv("RAY_TRAIN_COLLECTIVE_TIMEOUT_S", raising=False)
    assert run_of(PLAIN, resources={"engines": 2}).engine_actors == 2
    assert exchange_s(run_of(PLAIN)) == 650
    assert (exchange_s(run_of("vllm")), exchange_s(run_of("torch"))) == (1200, 600)
    with pytest.raises(
        ValueError, match=f"lora.rank=9: expected at most 8, the greatest rank of generation.engine={PLAIN}"
    ):
        run_of(PLAIN, rank=9)


def test_a_spec_that_is_none_is_refused(monkeypatch):
    monkeypatch.setattr("toys.engines.Apart.spec", "vllm")
    with pytest.raises(
        MarlRayError,
        match=r"^toys\.engines:Apart: its `spec` is 'vllm', expected an EngineSpec \(of marl_ray\.config\)$",
    ):
        engine_spec("toys.engines:Apart")


def test_an_engine_with_a_server_writes_an_arms_responses(tmp_path):
    assert ArmConfig(bundle="b", engine=PLAIN).engine == PLAIN
    bundle = make_text_bundle(tmp_path, 1, context=64)

    async def text(engine: str) -> str:
        arm = TextBatcher(load_bundle(bundle), 4, 60.0, engine)
        try:
            reply, written = arm.write(TextRequest("writer", "hello", 5)), ""
            while True:
                piece = await reply.next()
                written += piece.text
                if piece.finish is not None:
                    return written
        finally:
            arm.close()

    assert asyncio.run(text(PLAIN)) == asyncio.run(text("torch"))
    arm = TextBatcher(load_bundle(bundle), 4, 60.0, PLAIN)
    try:
        with pytest.raises(FieldError, match=f"engine={PLAIN} writes no JSON on demand"):
            arm.model("writer").guide(TextRequest("writer", "hello", 5, is_json_object=True))
        with pytest.raises(FieldError, match=f"engine={PLAIN} takes neither biases nor penalties"):
            arm.model("writer").check_bias(TextRequest("writer", "hello", 5, bias=LogitBias(((1, 2.0),))))
    finally:
        arm.close()
