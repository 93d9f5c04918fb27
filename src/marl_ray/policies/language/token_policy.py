"""The token policy: a causal language model with critics on its last hidden states."""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.utils.logging import disable_progress_bar

from marl_ray.config.run.model import GenerationConfig, ModelConfig
from marl_ray.errors import MarlRayError, one_line
from marl_ray.policies.agreement import run_on_all_workers
from marl_ray.policies.bundles.manifest import MANIFEST_FILE, TokenManifest, check_models, local_folder, read_manifest
from marl_ray.policies.engines.models.architectures import logits_shape
from marl_ray.policies.engines.models.llama import is_llama
from marl_ray.policies.language import packing
from marl_ray.policies.language.lora import add_adapters, bare_name, merged_weights, without_adapters
from marl_ray.policies.language.model_files import check_same_model, empty_model, load_model
from marl_ray.policies.language.packing import PackedSequences
from marl_ray.policies.language.sharding.joint_pass import JointRows, JointWorkers
from marl_ray.policies.language.sharding.stored_weights import StoredWeights
from marl_ray.policies.language.tiny_models import byte_tokenizer, tiny_model
from marl_ray.policies.prompting.protocol import Tokenizer
from marl_ray.policies.prompting.tokenizers import check_vocabulary, load_tokenizer
from marl_ray.policies.prompting.turn_ends import end_tokens, write_end_tokens

disable_progress_bar()  # else every worker would show a progress bar for every model

LayOut = Callable[[Tensor, Tensor, Tensor], tuple[Tensor | PackedSequences, Tensor, Tensor, Tensor]]
"""`packing.pack` or `lay_out`."""
MAX_LOGITS = 1 << 25
"""Maximum number of logits that are in memory at once."""


@dataclass(frozen=True)
class TokenOutputs:
    """A policy's outputs for responses; zeros where the policy did not decide."""

    log_probs: Tensor
    """(R, T) float32 log-probability of each token at the generation's temperature."""
    entropy: Tensor
    """(R, T) float32 entropy of each token's distribution, in nats; zeros if not asked for."""
    values: Tensor | None
    """(R, T) float32 the critic's estimate before each token."""
    cost_values: Tensor | None
    """(R, T, K) float32 likewise for the cost critic."""


@dataclass(frozen=True)
class Sharding:
    """The sharding of a policy over workers, and what follows for its passes."""

    joint: JointWorkers | None
    """The workers that compute each pass together; None where every worker computes its own passes."""
    gathered_bytes: int
    """Bytes of all weights in the type that passes compute with."""
    gathers_once: bool
    """True if the weights stay gathered over the passes of a gradient step."""


@dataclass(frozen=True, eq=False)
class WeightSource:
    """The places from which an empty copy's weights come."""

    stored_weights: StoredWeights
    """The files of weights that are never trained."""
    trained_policy: "TokenPolicy | None"
    """The policy whose shards are the trained weights; None for a frozen policy."""


class TokenPolicy(nn.Module):
    """A causal language model, and the heads of its critics.

    It is always in evaluation mode: dropout would give the trained tokens other log-probabilities than the sampled ones.
    """

    lm: Any

    def __init__(
        self,
        lm: nn.Module,
        tokenizer: Tokenizer,
        config: ModelConfig,
        generation: GenerationConfig,
        critic: bool = False,
        signals: int = 0,
    ):
        """`signals` cost signals get a critic."""
        super().__init__()
        self.lm = lm
        self.tokenizer, self.config, self.generation = tokenizer, config, generation
        self.base = config.path
        """Path of the weights without adapters; None if they were drawn at random."""
        self.base_sha256: str | None = None
        """Digest of the weights without adapters, where a bundle tells it: see `base_model.base_sha256`."""
        self.version = 0
        """Number of times that `refresh` has given this sampling copy new weights: one for each update."""
        self.unread: StoredWeights | None = None
        """The files of the weights that are still on the meta device."""
        self.source: WeightSource | None = None
        """The source of the weights of an empty copy; None for a policy that has its weights."""
        self.home: torch.device | None = None
        """The device of an empty copy."""
        self.sharded: Sharding | None = None
        """None until `shard` spreads the policy."""
        self._logits = logits_shape(lm)
        self.end_tokens = end_tokens(lm, tokenizer)
        """Tokens that end a response."""
        write_end_tokens(lm, self.end_tokens)
        width = self.lm.get_output_embeddings().weight.shape[-1]
        self.value_head = _make_head(width, 1) if critic else None
        self.cost_head = _make_head(width, signals) if signals else None
        self.packs = is_llama(lm, config.context)
        """True if the responses of a pass share the reading of equal prompts."""
        if self.packs:
            packing.use_packed_attention(lm)
        self.eval()

    def train(self, mode: bool = True) -> "TokenPolicy":
        """Keep evaluation mode, whatever `mode` is."""
        return super().train(False)

    @property
    def device(self) -> torch.device:
        """The device on which a pass computes: `home`, or else that of the parameters."""
        return self.home or next(self.parameters()).device

    @property
    def joint(self) -> JointWorkers | None:
        """The workers that compute each pass together; None where every worker computes its own passes."""
        return None if self.sharded is None else self.sharded.joint

    @property
    def heads(self) -> list[nn.Linear]:
        """The critics."""
        return [head for head in (self.value_head, self.cost_head) if head is not None]

    def actor_parameters(self) -> list[nn.Parameter]:
        """Return the trainable parameters of the language model, which the critics share."""
        return [parameter for parameter in self.lm.parameters() if parameter.requires_grad]

    def forward(
        self,
        sequences: Tensor | PackedSequences,
        places: Tensor,
        targets: Tensor,
        need_entropy: bool,
        learn_entropy: bool,
    ) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
        """Return the log-probabilities (N,) of `targets` (N,), entropies (N,), values (N, 1) and cost values (N, K).

        `sequences` are ids (R, S) from the left or packed ones, `places` (N,) where in R * S, or in S, each target is
        predicted. All in one call, because under FSDP2 each call of the wrapped module is one gather of its weights. Of
        workers that compute a pass together all get the same sequences, and each gets the targets that it scores; `places`
        are then in its own part of S.
        """
        joint = self.joint
        if isinstance(sequences, PackedSequences):
            states = packing.last_hidden_states(self.lm, sequences, None if joint is None else joint.context)
        else:
            # Padding stands on the right, which causal attention does not read, so no mask is built.
            states = self.lm.get_decoder()(input_ids=sequences, use_cache=False).last_hidden_state.flatten(0, 1)
        if joint is not None:
            states = joint.replicate_states(states)
        states = states.index_select(0, places)
        size = max(1, MAX_LOGITS // self.lm.get_output_embeddings().weight.shape[0])
        chunks = list(zip(states.split(size), targets.split(size), strict=True))
        score: Any = self._score
        if len(chunks) > 1 and torch.is_grad_enabled():  # the backward pass computes each chunk's logits again
            score = functools.partial(checkpoint, self._score, use_reentrant=False)
        parts = [score(*chunk, need_entropy, learn_entropy) for chunk in chunks]
        log_probs, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        values = None if self.value_head is None else self.value_head(states).float()
        cost_values = None if self.cost_head is None else self.cost_head(states).float()
        return log_probs, entropy, values, cost_values

    def _score(self, states: Tensor, targets: Tensor, need_entropy: bool, learn_entropy: bool) -> tuple[Tensor, Tensor]:
        log_p = (self.logits(states) / self.generation.temperature).log_softmax(-1)
        target_log_p = log_p.gather(-1, targets[:, None]).squeeze(-1)
        if not need_entropy:
            return target_log_p, torch.zeros_like(target_log_p)
        entropy_log_p = log_p if learn_entropy else log_p.detach()
        return target_log_p, -(entropy_log_p.exp() * entropy_log_p).sum(-1)

    def logits(self, states: Tensor) -> Tensor:
        """Return float32 logits (N, V) of last hidden states (N, H), scaled and capped as some architectures do."""
        shape = self._logits
        logits: Tensor = self.lm.get_output_embeddings()(states).float() * shape.factor
        if shape.cap is not None:
            logits = (logits / shape.cap).tanh() * shape.cap
        return logits[..., : shape.width]

    def evaluate(
        self, prompts: Tensor, responses: Tensor, mask: Tensor, need_entropy: bool = True, learn_entropy: bool = True
    ) -> TokenOutputs:
        """Score responses, with gradients.

        `prompts` are (R, P), on the right with -1 before them; `responses` and `mask` are (R, T). Without
        `learn_entropy` the entropy has no gradients, whose pass would hold every token's distribution once more. A call
        without rows still takes part in the workers' collectives.
        """
        joint = self.joint
        joint_rows = (
            JointRows(prompts, responses, mask) if joint is None else joint.rows_of_all(prompts, responses, mask)
        )
        parted = self.packs and bool(joint_rows.mask.any())
        parts = 1 if joint is None else joint.context.size()
        lay: LayOut = functools.partial(packing.pack, parts=parts) if parted else lay_out
        sequences, places, rows, steps = lay(*joint_rows[:3])
        targets = joint_rows.responses[rows, steps]
        if joint is None:
            log_probs, entropy, values, costs = self(sequences, places, targets, need_entropy, learn_entropy)
        else:
            numbers, own_places = joint.choose_decisions(places, sequences[0].numel(), parted)
            scored = self(sequences, own_places, targets[numbers], need_entropy, learn_entropy)
            (log_probs, entropy, values, costs), rows, of_worker = joint_rows.of_worker(
                joint.join_outputs(scored, numbers, len(targets)), rows
            )
            steps = steps[of_worker]

        def spread(flat: Tensor) -> Tensor:
            return flat.new_zeros(*mask.shape, *flat.shape[1:]).index_put((rows, steps), flat)

        return TokenOutputs(
            spread(log_probs),
            spread(entropy),
            None if values is None else spread(values.squeeze(-1)),
            None if costs is None else spread(costs),
        )

    def order(self, prompts: Tensor, mask: Tensor) -> Tensor:
        """Return (R,) numbers: a pass of `evaluate` over responses with similar numbers costs less."""
        if self.packs:  # a pass reads each prompt once, and has no padding
            _, numbers = torch.unique(prompts, dim=0, return_inverse=True)
            assert isinstance(numbers, Tensor)
            return numbers
        return (prompts >= 0).sum(1) + mask.sum(1)

    def reference_evaluate(self, prompts: Tensor, responses: Tensor, mask: Tensor) -> Tensor:
        """Return (R, T) log-probabilities under the model without its adapters, without gradients."""
        with torch.no_grad(), without_adapters(self.lm):
            return self.evaluate(prompts, responses, mask, need_entropy=False).log_probs


def _make_head(width: int, out: int) -> nn.Linear:
    # The critics' first outputs are near zero. Noise of the size of the returns would enter the first targets through
    # bootstrapping.
    head = nn.Linear(width, out)
    nn.init.orthogonal_(head.weight, 0.01)
    nn.init.zeros_(head.bias)
    return head


def lay_out(prompts: Tensor, responses: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Lay out sequences from the left, and return them with the places, rows and steps of their decisions.

    The ids are (R, S), and the place is where a decision is predicted. The place is in R * S; places, rows and steps
    are (N,) each. Sequences are as short as possible. The last token of a response is left out, because nothing follows
    it. Without rows there is one sequence of one token.
    """
    rows, steps = mask.nonzero(as_tuple=True)
    before = (prompts < 0).sum(1)
    lengths = prompts.shape[1] - before
    # Prompts end where responses begin, so a sequence is one stretch of the two side by side.
    both = torch.cat([prompts, responses], 1)
    ends = (mask * (lengths[:, None] + torch.arange(mask.shape[1], device=mask.device))).amax(1)
    width = max(1, int(ends.max()) if len(ends) else 1)
    columns = torch.arange(width, device=both.device)
    ids = both.gather(1, (before[:, None] + columns).clamp_max(both.shape[1] - 1))
    ids = torch.where(columns < ends[:, None], ids, 0)
    if not len(ids):
        ids = ids.new_zeros(1, width)
    return ids, rows * width + lengths[rows] + steps - 1, rows, steps


def build_token_policy(
    config: ModelConfig,
    generation: GenerationConfig,
    seed: int,
    critic: bool = False,
    signals: int = 0,
    tracking_uri: str | None = None,
    unread: bool = False,
) -> TokenPolicy:
    """Make a policy in float32 on CPU, equal on every worker, because all random weights come from the seed.

    With `unread` the weights of `config.path` stay in their files, if they can, until `shard` and `plain_copy` read them.
    Raises MarlRayError if `config.path` is no causal language model, has fewer positions than `config.context`, or has a
    tokenizer without an end or of another vocabulary.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        stored: StoredWeights | None = None
        if config.preset is not None:
            tokenizer = byte_tokenizer(config.context)
            lm = tiny_model(config.preset, tokenizer, config.context)
        else:
            with model_folder(str(config.path), tracking_uri) as folder:
                empty = empty_model(folder, config.context) if unread else None
                lm, stored = empty or (load_model(folder, torch.float32, config.context), None)
                tokenizer = load_tokenizer(folder)
            check_vocabulary(tokenizer, lm, str(config.path))
        if config.lora is not None:
            add_adapters(lm, config.lora)
        policy = TokenPolicy(lm, tokenizer, config, generation, critic, signals)
        policy.unread = stored
        return policy


@contextmanager
def model_folder(path: str, tracking_uri: str | None) -> Iterator[str]:
    """Yield the folder of a model's files, within the block.

    For a bundle it is the folder of its only policy. Raises MarlRayError for a bundle of another kind or of several
    policies.
    """
    if not path.startswith("models:/") and not (Path(path) / MANIFEST_FILE).is_file():
        yield path
        return
    with local_folder(path, tracking_uri) as folder:
        manifest = read_manifest(folder)
        if not isinstance(manifest, TokenManifest):
            raise MarlRayError(f"model.path {path!r} is a bundle of actor-critics, expected a language model")
        if len(manifest.policies) > 1:
            names = ", ".join(manifest.policies)
            raise MarlRayError(f"model.path {path!r} is a bundle of {names}: expected the folder of one of them")
        check_models(folder, manifest)
        yield str(folder / next(iter(manifest.policies)))


def read_weights(policy: TokenPolicy, device: torch.device) -> None:
    """Give weights that are still in files their values, on `device`; every worker takes part.

    Raises MarlRayError, on all workers together, where one cannot read its own.
    """
    if policy.unread is None:
        return
    unread, policy.unread = policy.unread, None

    def read_own() -> None:
        try:
            unread.read_into(policy.lm, device)
        except torch.OutOfMemoryError as error:
            raise MarlRayError(
                f"model.path {policy.config.path!r}: out of memory while its weights were read; expected more workers or "
                f"model.cpu_offload ({one_line(error)})"
            ) from error

    if dist.is_initialized():
        run_on_all_workers(read_own)
    else:
        read_own()


def move_to_device(policy: TokenPolicy, device: torch.device) -> None:
    """Move a policy to a device, except for weights that are still in files."""
    for tensor in (*policy.parameters(), *policy.buffers()):
        if not tensor.is_meta:
            tensor.data = tensor.data.to(device)


def save_merged(policy: TokenPolicy, folder: str | Path) -> None:
    """Write the language model, adapters merged, in Hugging Face format."""
    lora = policy.config.lora is not None
    policy.lm.save_pretrained(folder, **({"state_dict": merged_weights(policy.lm)} if lora else {}))


def start_from_weights(policy: TokenPolicy, stored: StoredWeights) -> None:
    """Begin with the weights of other files than those that the policy was built from, and has not read yet.

    Adapters keep their own. Raises MarlRayError if they are of another model.
    """
    try:
        check_same_model(policy.lm, stored)
    except MarlRayError as error:
        raise MarlRayError(f"bundle: {error}") from error
    policy.unread = stored


@torch.no_grad()
def adopt_weights(policy: TokenPolicy, plain: TokenPolicy) -> None:
    """Copy the language model of a sampling copy into a policy that is not sharded yet and begins with its weights.

    Adapters keep their own weights. Raises MarlRayError if the two have different shapes.
    """
    targets = {bare_name(name): parameter for name, parameter in policy.lm.named_parameters()}
    for name, source in plain.lm.named_parameters():
        target = targets.get(name)
        if target is None or target.shape != source.shape:
            raise MarlRayError(f"bundle: holds a language model of another shape: {name} is {list(source.shape)}")
        target.copy_(source)
