"""Checks of a run of language models that need no weights."""

from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers import GenerationConfig as ModelGenerationConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from marl_ray.config import GenerationConfig, ModelConfig, RunConfig, engine_spec
from marl_ray.errors import MarlRayError, install_hint
from marl_ray.policies.engines.models.architectures import check_architecture
from marl_ray.policies.engines.models.llama import LLAMA_CLASSES, is_llama
from marl_ray.policies.language.lora import add_adapters
from marl_ray.policies.language.model_files import check_files, not_a_model
from marl_ray.policies.language.sharding.tensor_parallel import check_divisible
from marl_ray.policies.language.tiny_models import byte_tokenizer, tiny_model
from marl_ray.policies.language.token_policy import model_folder
from marl_ray.policies.prompting.prompts import check_fits, encode_prompt
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.tokenizers import check_vocabulary, load_tokenizer
from marl_ray.rollout.text.curriculum import Curriculum
from marl_ray.training.team.families.language_teams import bundle_weights
from marl_ray.training.texts.demonstrations import encode_examples, read_demonstrations
from marl_ray.training.texts.served_data import PolicyReader, read_data
from marl_ray.training.tracking.mlflow_run import uri_of

if TYPE_CHECKING:
    from pettingzoo import AECEnv


WEIGHT_FILES = (SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME)
SAMPLED_EPISODES = 16
"""Number of episodes that the check lets an environment demonstrate."""


class CheckedPolicy(NamedTuple):
    """The parts of a `TokenPolicy` that need no weights."""

    tokenizer: Tokenizer
    config: ModelConfig
    generation: GenerationConfig


def check_language(config: RunConfig, env: "AECEnv", agents: Mapping[str, Sequence[str]]) -> dict[str, CheckedPolicy]:
    """Return the policies of a team of language models that can play and learn here.

    Raises MarlRayError if it cannot. `agents` are policy -> its agents. Models are built without memory for their
    weights.
    """
    models = {}
    for name, members in agents.items():
        policy = config.team[name]
        engine = policy.generation.engine
        spec = engine_spec(engine)
        if spec.package is not None and find_spec(spec.package) is None:
            key = f"team.{name}.generation.engine={engine}"
            raise MarlRayError(f"{key}: expected the package {spec.package}; {install_hint(spec.package)}")
        assert policy.model is not None
        models[name] = _build_model(policy.model, uri_of(config))
        where = f"team.{name}.model.path {policy.model.path!r}"
        check_architecture(models[name][0].config, engine, policy.model.context, where)
        if not policy.frozen:
            check_mesh(config, models[name][0], name)
        if spec.host is not None:
            _check_parts(config.resources.tensor_parallel, models[name][0].config, name)
        try:
            encode_prompt(models[name][1], "a", policy.model.chat)
        except MarlRayError as error:
            raise MarlRayError(f"team.{name}.{error}") from error
        bundle_weights(config, name, members[0])
    table = {agent: name for name, members in agents.items() for agent in members}
    env.reset(seed=0, options={"index": 0, "split": "train"})
    first = env.agent_selection
    policy = config.team[table[first]]
    assert policy.model is not None
    ids = encode_prompt(models[table[first]][1], env.observe(first), policy.model.chat)
    check_fits(ids, policy.generation.max_tokens, policy.model.context, f"team.{table[first]}: the first prompt")
    if config.evaluation.every:
        # raises an error if the environment has no held-out tasks
        env.reset(seed=0, options={"index": 0, "split": "test"})
    if config.train.curriculum:
        Curriculum(config.train.curriculum, env, {})
    if config.data is not None:
        read_data(config, agents, {name: PolicyReader(*model) for name, model in models.items()})
    if config.warm_start is not None:
        for name, demonstrations in read_demonstrations(config, env, agents, SAMPLED_EPISODES).items():
            encode_examples(demonstrations, *models[name], config, name)
    return {
        name: CheckedPolicy(tokenizer, config.team[name].model, config.team[name].generation)  # type: ignore[arg-type]
        for name, (_, tokenizer) in models.items()
    }


def check_mesh(config: RunConfig, lm: Any, name: str) -> None:
    """Raise MarlRayError if the run's workers cannot compute passes of a model together."""
    need, model = config.resources, config.team[name].model
    assert model is not None
    if need.tensor > 1:
        try:
            check_divisible(lm, need.tensor)
        except MarlRayError as error:
            raise MarlRayError(f"resources.parallel.tensor={need.tensor}, team.{name}.model: {error}") from error
    if need.context > 1:
        key = f"resources.parallel.context={need.context}, team.{name}.model"
        if not is_llama(lm, model.context):
            raise MarlRayError(
                f"{key}: expected one of {', '.join(sorted(LLAMA_CLASSES))}, whose attention reads packed sequences"
            )
        heads = lm.config.num_attention_heads // need.tensor
        if heads % need.context:
            share = f" that each worker has of every layer (tensor={need.tensor})" if need.tensor > 1 else ""
            raise MarlRayError(f"{key}: expected a divisor of its {heads} attention heads{share}")


def _check_parts(parts: int, settings: Any, name: str) -> None:
    """Raise MarlRayError if an engine cannot divide a model's layers into this many parts."""
    heads = getattr(settings.get_text_config(), "num_attention_heads", parts)
    if heads % parts:
        raise MarlRayError(
            f"resources.tensor_parallel={parts}: expected a divisor of the {heads} attention heads of team.{name}.model"
        )


def _build_model(model: ModelConfig, uri: str) -> tuple[Any, Any]:
    """Build the model, with its adapters, and its tokenizer."""
    if model.preset is not None:
        tokenizer = byte_tokenizer(model.context)
        lm: Any = tiny_model(model.preset, tokenizer, model.context)
    else:
        with model_folder(str(model.path), uri) as folder:
            try:
                settings = AutoConfig.from_pretrained(folder)
                with torch.device("meta"):
                    lm = AutoModelForCausalLM.from_config(settings)
            except Exception as error:  # transformers raises different errors for different models
                raise not_a_model(folder, error) from error
            tokenizer = load_tokenizer(folder)
            check_vocabulary(tokenizer, lm, str(model.path))
            _check_weights(folder, str(model.path))
            if Path(folder).is_dir():
                check_files(folder, lm)
            lm.generation_config = _generation_config(folder, lm.generation_config)
        positions = getattr(settings.get_text_config(), "max_position_embeddings", None) or model.context
        if positions < model.context:
            raise MarlRayError(f"model.context={model.context}: {model.path!r} has positions for {positions} tokens")
    if model.lora is not None:
        add_adapters(lm, model.lora)
    return lm, tokenizer


def _check_weights(folder: str, path: str) -> None:
    """Raise MarlRayError if a folder has no weights, or only pickled ones.

    Names that transformers knows pass.
    """
    if Path(folder).is_dir() and not any(Path(folder, name).is_file() for name in WEIGHT_FILES):
        raise MarlRayError(f"model.path {path!r} has no weights: expected one of {', '.join(WEIGHT_FILES)}")


def _generation_config(folder: str, otherwise: Any) -> Any:
    try:
        return ModelGenerationConfig.from_pretrained(folder)
    except OSError:  # without the file, the values of the model's own config apply
        return otherwise
