"""Arms whose policies are adapters of one base model: one process of vLLM writes for all of them."""

import asyncio
import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from toy_models.sampled_by_vllm import lora_bundle
from toy_serving.gateways import with_gateway
from toy_serving.text_gateways import events, post, text_config

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.loading import load_bundle
from marl_ray.policies.bundles.manifest import MANIFEST_FILE, file_hash, read_manifest
from marl_ray.policies.engines.base import EngineRefusedError, Prompt
from marl_ray.policies.engines.vllm.process.messages import VllmRequest
from marl_ray.policies.engines.vllm.serving import WARM_UP, join_base
from marl_ray.policies.language.base_model import BASE_SHA256
from marl_ray.policies.prompting.prompts import encode_prompt
from marl_ray.serving.arms.errors import ArmError
from marl_ray.serving.arms.protocol import ResponseChunk, TextRequest
from marl_ray.serving.arms.text.batcher import TextBatcher

EXACT = 1e-5
"""Greatest difference of log-probabilities in float32."""


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("lora")
    return {name: lora_bundle(folder, seed) for seed, name in enumerate(("one", "two"))}


@pytest.fixture(scope="module")
def arms(bundles: dict[str, str]) -> Iterator[dict[str, TextBatcher]]:
    """Two arms that every test leaves ready to write."""
    both = {name: arm_of(bundle) for name, bundle in bundles.items()}
    yield both
    for arm in both.values():
        arm.close()


def arm_of(bundle: str) -> TextBatcher:
    return TextBatcher(load_bundle(bundle), 8, 120.0, "vllm")


def process_of(arm: TextBatcher):
    return arm.batch("writer").engine.process  # type: ignore[attr-defined]  # vLLM's engine


def requests(count: int = 4, tokens: int = 12) -> list[TextRequest]:
    return [
        TextRequest("writer", "a" * (1 + k), k, changes={"max_tokens": tokens}, streamed=True) for k in range(count)
    ]


async def write(arm: TextBatcher, request: TextRequest) -> list[ResponseChunk]:
    reply = arm.write(request)
    pieces: list[ResponseChunk] = []
    try:
        while not pieces or pieces[-1].finish is None:
            pieces.append(await reply.next())
    finally:
        reply.leave()
    return pieces


def ids_of(pieces: list[ResponseChunk]) -> list[int]:
    return [token for piece in pieces for token in piece.ids]


async def all_written(arms: dict[str, TextBatcher], tokens: int = 12) -> dict[str, list[list[ResponseChunk]]]:
    """By arm the pieces of each response; all are asked for at once."""
    bodies = requests(tokens=tokens)
    answers = await asyncio.gather(*(write(arm, body) for arm in arms.values() for body in bodies))
    return {name: answers[place * len(bodies) :][: len(bodies)] for place, name in enumerate(arms)}


def check_scores(bundle: str, request: TextRequest, pieces: list[ResponseChunk]) -> None:
    """The log-probabilities are those of the merged weights."""
    policy = load_bundle(bundle).policies["lm"]
    prompt = torch.tensor([encode_prompt(policy.tokenizer, request.prompt, True)])
    ids = torch.tensor([ids_of(pieces)])
    scores = policy.evaluate(prompt, ids, torch.ones_like(ids, dtype=torch.bool), need_entropy=False).log_probs
    answered = [score for piece in pieces for score in piece.log_probs]
    assert answered == pytest.approx(scores[0].tolist(), abs=EXACT)


def test_two_adapters_stream_out_of_the_same_steps_of_one_process(arms, bundles, monkeypatch):
    process, ask, steps = process_of(arms["one"]), process_of(arms["one"]).ask, []
    added: list[VllmRequest] = []

    def recorded(method, *arguments, **more):
        if method == "step" and len(added) < 8:
            return []  # a short response would end before a late one begins
        answer = ask(method, *arguments, **more)
        if method == "add":
            added.extend(*arguments)
        if method == "step":
            steps.append([token.version for token in answer])
        return answer

    monkeypatch.setattr(process, "ask", recorded)
    together = asyncio.run(all_written(arms, tokens=24))
    assert process_of(arms["two"]).pid == process.pid
    shared = [versions for versions in steps if len(set(versions)) == 2]
    assert len(shared) > 12 and max(map(len, shared)) == 8
    for name, answers in together.items():
        for request, pieces in zip(requests(tokens=24), answers, strict=True):
            assert len(pieces) > len(ids_of(pieces)) / 2
            check_scores(bundles[name], request, pieces)
    assert together["one"][0] != together["two"][0]
    for name, arm in arms.items():
        alone = asyncio.run(write(arm, requests(tokens=24)[0]))
        assert ids_of(alone) == ids_of(together[name][0])


def test_an_arm_that_comes_and_goes_disturbs_nobody(arms, bundles, tmp_path):
    expected = asyncio.run(write(arms["one"], requests(1, tokens=50)[0]))
    pid = process_of(arms["one"]).pid

    async def body() -> list[ResponseChunk]:
        writing = asyncio.create_task(write(arms["one"], requests(1, tokens=50)[0]))
        third = await asyncio.to_thread(arm_of, lora_bundle(tmp_path, 3))
        reply = third.write(requests(1, tokens=50)[0])
        assert isinstance(await reply.next(), ResponseChunk)
        assert process_of(third).pid == pid
        await asyncio.to_thread(third.close)  # amid its response
        return await writing

    assert ids_of(asyncio.run(body())) == ids_of(expected)
    assert process_of(arms["one"]).pid == pid


def test_all_responses_fail_with_their_process_once_and_the_next_are_written_by_another(arms, tmp_path):
    idle = arm_of(lora_bundle(tmp_path, 3))
    everybody = arms | {"idle": idle}
    old = process_of(idle)

    async def body() -> None:
        replies = [arm.write(requests(1, tokens=50)[0]) for arm in arms.values()]
        for reply in replies:
            await reply.next()
        os.kill(old.pid, signal.SIGKILL)
        for reply in replies:
            with pytest.raises(ArmError, match=r"generation\.engine=vllm: its process died"):  # noqa: PT012
                while True:
                    await reply.next()

    try:
        expected = asyncio.run(all_written(everybody))
        asyncio.run(body())
        again = asyncio.run(all_written(everybody))
        assert {process_of(arm).pid for arm in everybody.values()} == {process_of(idle).pid} != {old.pid}
    finally:
        idle.close()
    for name in everybody:
        assert list(map(ids_of, again[name])) == list(map(ids_of, expected[name]))


def test_a_prompt_that_vllm_refuses_is_its_arms_affair(arms):
    async def body() -> list[ResponseChunk]:
        writing = asyncio.create_task(write(arms["one"], requests(1, tokens=50)[0]))
        decoder = arms["two"].batch("writer").engine.decoder()
        with pytest.raises(EngineRefusedError, match="64"):
            await asyncio.to_thread(decoder.add, [Prompt((1, 2), 0), Prompt(tuple(range(1, 90)), 1)], 0, WARM_UP)
        return await writing

    expected = asyncio.run(write(arms["one"], requests(1, tokens=50)[0]))
    assert ids_of(asyncio.run(body())) == ids_of(expected)
    assert asyncio.run(all_written(arms))


def test_a_greater_rank_than_the_process_has_room_for_is_refused_by_name(arms, tmp_path):
    with pytest.raises(MarlRayError, match=r"engine=vllm: the adapter of .* has rank 40, expected at most 32"):
        arm_of(lora_bundle(tmp_path, 1, rank=40))
    assert asyncio.run(all_written(arms))


def test_an_adapter_of_another_base_has_no_place_in_the_process(arms, bundles, tmp_path):
    other = lora_bundle(tmp_path, 1, base=1)
    # The process of this base would start with its first token.
    base, _ = join_base(load_bundle(other).policies.load_unmerged("lm"))
    assert base is not arms["one"].batch("writer").engine.base is arms["two"].batch("writer").engine.base
    with pytest.raises(MarlRayError, match=r"engine=vllm: the adapter of .* is not of the base model that it names"):
        arm_of(posing(other, bundles["one"], tmp_path / "posing"))


def posing(bundle: str, other: str, folder: Path) -> str:
    """A copy of a bundle whose adapter names the base model of another one."""
    shutil.copytree(bundle, folder)
    name = f"adapter/{BASE_SHA256}"
    path = folder / "lm" / name
    shutil.copyfile(Path(other) / "lm" / name, path)
    manifest = read_manifest(folder)
    manifest.policies["lm"].files[name] = file_hash(path)
    manifest.digest = manifest.content_digest()
    (folder / MANIFEST_FILE).write_text(json.dumps(manifest.model_dump(mode="json")))
    return str(folder)


def test_a_gateway_serves_both_arms_by_one_process(bundles, tmp_path):
    config = text_config(bundles, tmp_path)
    experiment = config.experiments[0]
    both = {name: arm.model_copy(update={"engine": "vllm"}) for name, arm in experiment.arms.items()}
    config = config.model_copy(update={"experiments": (experiment.model_copy(update={"arms": both}),)})
    requests_sent = [{"session_id": f"s{k}", "prompt": "a" * (1 + k), "seed": k, "max_tokens": 4 + k} for k in range(8)]

    async def body(client):
        together = await asyncio.gather(*(post(client, "/generate", request) for request in requests_sent))
        return together, await asyncio.gather(*(events(client, "/generate", request) for request in requests_sent))

    together, streamed = with_gateway(config, body)
    assert {full["arm"] for full in together} == {"one", "two"}
    for full, parts in zip(together, streamed, strict=True):
        assert [token for part in parts for token in part["tokens"]] == full["tokens"]
        assert len(parts) > 1
