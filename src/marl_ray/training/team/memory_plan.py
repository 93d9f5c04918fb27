"""The memory that a run of language models takes of each GPU, computed before a cluster is asked for any."""

import math
from dataclasses import dataclass
from pathlib import Path

from marl_ray.config import ModelConfig, RunConfig
from marl_ray.errors import MarlRayError
from marl_ray.policies.language.model_files import empty_lm, reads_by_shards
from marl_ray.policies.language.sharding.stored_weights import tied_names
from marl_ray.policies.language.token_policy import model_folder
from marl_ray.training.team.dry_step import DryPass, DryPeak, dry_step
from marl_ray.training.team.families.language_teams import engine_has_weights
from marl_ray.training.team.language_checks import check_mesh
from marl_ray.training.team.model_shapes import read_architecture
from marl_ray.training.tracking.mlflow_run import uri_of

BF16, FLOAT32 = 2, 4
"""Bytes of a number."""


@dataclass(frozen=True)
class MemoryPlan:
    """Bytes of each GPU of a run, at the moment of a step when they are most."""

    gpus: int
    """Number of GPUs of the run; the other fields are bytes."""
    weights: int
    """Shards of the weights."""
    gradients: int
    """Shards of the gradients."""
    optimizer: int
    """Shards of the optimisers' states."""
    gathered: int
    """Weights that are gathered at once."""
    activations: int
    """Activations of a pass."""
    reference: int
    """Shards of the weights that the divergence is measured from."""
    sampling: int
    """Complete copies that sample, on every worker; none of policies whose engine has the weights itself."""
    resting: int
    """The part that stays between steps, while the team plays: all of the above but `gathered` and `activations`."""
    main_memory: int
    """Bytes of each worker's main memory that `cpu_offload` takes."""

    @property
    def total(self) -> int:
        """All bytes of one GPU."""
        return self.resting + self.gathered + self.activations


def memory_plan(config: RunConfig, gpus: int) -> MemoryPlan:
    """Compute the memory of each GPU from a dry step of each policy, with every worker on a GPU.

    Policies learn one after another, so of `gathered` and `activations` the greatest counts.

    Raises MarlRayError if the policies are actor-critics, if groups of `resources.parallel` do not divide the GPUs,
    if a model cannot be divided as they say, or if its shape is not known. Starts and ends a process group, so the
    process must have none.
    """
    shards = weight_shards(config, gpus)
    if not config.has_language_models:
        raise MarlRayError("team: expected language models; actor-critics are small, and their memory is not computed")
    mixed = config.resources.mixed_precision != "none"
    frozen_bytes = BF16 if mixed else FLOAT32
    steps: list[DryPeak] = []
    reference = sampling = offloaded = 0
    for name, policy in config.team.items():
        assert policy.model is not None
        try:
            shape = read_architecture(policy.model, uri_of(config))
        except MarlRayError as error:
            raise MarlRayError(f"team.{name}.{error}") from error
        lm = empty_lm(shape)
        numbers = sum(lm.get_parameter(names[0]).numel() for names in tied_names(lm))  # tied ones count once
        sampling += numbers * sampling_bytes(config, name)
        if policy.frozen:
            continue
        check_mesh(config, lm, name)
        compared = (config.hyper_of(name).kl_coef > 0 or config.spec_of(name).pairs) and policy.model.lora is None
        axes = (config.resources.context, config.resources.tensor)
        adam = config.hyper_of(name).optimizer == "adamw"
        try:
            peak = dry_step(
                shape,
                policy.model,
                shards,
                pass_of(config, name),
                mixed,
                adam and not policy.model.cpu_offload,
                axes,
            )
        except MarlRayError as error:
            raise MarlRayError(f"team.{name}.model: {error}") from error
        reference_bytes = math.ceil(numbers / shards) * frozen_bytes if compared else 0
        if policy.model.cpu_offload:  # gradients and moments are of the weights that have gradients
            offloaded += peak.weights + (3 if adam else 1) * peak.gradients + reference_bytes
            peak, reference_bytes = peak._replace(weights=0, gradients=0), 0
        reference += reference_bytes
        steps.append(peak)
    weights, gradients, optimizer = (
        sum(getattr(peak, kind) for peak in steps) for kind in ("weights", "gradients", "optimizer")
    )
    largest = max(steps, key=lambda peak: peak.gathered + peak.activations)
    return MemoryPlan(
        gpus=gpus,
        weights=weights,
        gradients=gradients,
        optimizer=optimizer,
        gathered=largest.gathered,
        activations=largest.activations,
        reference=reference,
        sampling=sampling,
        resting=weights + gradients + optimizer + reference + sampling,
        main_memory=offloaded,
    )


def weight_shards(config: RunConfig, gpus: int) -> int:
    """Return the number of GPUs that share one set of weights.

    The number is `shard` x `context` x `tensor` of `resources.parallel`, or, where `shard` is not given, as many as
    make up `replicate` groups. Raises MarlRayError if there are no whole groups.
    """
    parallel = config.resources.parallel
    for key, number in parallel.items():
        if gpus % number:
            raise MarlRayError(f"resources.parallel.{key}={number}: expected a divisor of the {gpus} GPUs")
    joint_gpus = config.resources.context * config.resources.tensor
    shards = parallel["shard"] * joint_gpus if "shard" in parallel else gpus // parallel.get("replicate", 1)
    if gpus % shards or shards % joint_gpus:
        mesh = " x ".join(f"{key}={number}" for key, number in parallel.items())
        raise MarlRayError(f"resources.parallel: {mesh}, expected their product to be a divisor of the {gpus} GPUs")
    return shards


def pass_of(config: RunConfig, name: str) -> DryPass:
    """Return the largest pass of a policy, in sequences that fill the context.

    The pass has `train.micro_batch` sequences or, where it is not given, one, because workers on GPUs then measure
    themselves how many fit.
    """
    hyper, rows = config.hyper_of(name), config.train.micro_batch or 1
    if config.spec_of(name).pairs:
        rows = max(2, rows // 2 * 2)
    tokens = config.team[name].generation.max_tokens
    return DryPass(rows, tokens, hyper.entropy_coef > 0 or hyper.entropy_target is not None)


def sampling_bytes(config: RunConfig, name: str) -> int:
    """Return the bytes of each number of the copy that samples on every worker; 0 where no worker has one."""
    model = config.team[name].model
    assert model is not None
    if engine_has_weights(config, name) and _stays_in_files(model, uri_of(config)):
        return 0
    return FLOAT32 if model.dtype == "fp32" else BF16


def _stays_in_files(model: ModelConfig, tracking_uri: str | None) -> bool:
    """Return True if workers read a model's weights by their shards.

    An engine's copy may then be without weights.
    """
    if model.path is None:
        return False
    if not Path(model.path).is_dir() and not model.path.startswith("models:/"):
        return True  # a name, whose files are nowhere yet
    with model_folder(model.path, tracking_uri) as folder:
        return reads_by_shards(folder, model.context)
