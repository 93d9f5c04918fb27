"""Loading of bundles of both families: a bundle's manifest says which one it is of."""

import weakref
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from marl_ray.errors import MarlRayError
from marl_ray.policies.bundles.actor_critic import ActorCriticBundle, read_actor_critics
from marl_ray.policies.bundles.manifest import Manifest, check_models, local_folder, read_manifest
from marl_ray.stored_files.folder_kinds import DIGEST_DIGITS

if TYPE_CHECKING:
    from marl_ray.policies.bundles.language import TokenBundle


def load_bundle(
    reference: str | Path, tracking_uri: str | None = None, digest: str | None = None
) -> "ActorCriticBundle | TokenBundle":
    """Read and verify a bundle from a folder or from `models:/name/version` (an MLflow registry).

    Raises MarlRayError if it is missing, malformed, if any content differs from its digest, or if it has another `digest`.
    """
    with ExitStack() as cleanup:
        folder = cleanup.enter_context(local_folder(str(reference), tracking_uri))
        manifest = read_manifest(folder)
        if digest is not None and manifest.digest != digest:
            raise MarlRayError(
                f"bundle {str(reference)!r}: expected digest {digest[:DIGEST_DIGITS]}, got {manifest.digest[:DIGEST_DIGITS]}"
            )
        if isinstance(manifest, Manifest):
            return read_actor_critics(folder, manifest)
        check_models(folder, manifest)
        from marl_ray.policies.bundles.language import Models, TokenBundle  # transformers takes seconds to import

        models = Models(folder, manifest)
        weakref.finalize(models, cleanup.pop_all().close)  # the models are read from the folder at their first use
        return TokenBundle(manifest, models)


def load_actor_critics(reference: str | Path, tracking_uri: str | None = None) -> ActorCriticBundle:
    """Load a bundle of actor-critics. Raises MarlRayError if it is one of language models."""
    bundle = load_bundle(reference, tracking_uri)
    if not isinstance(bundle, ActorCriticBundle):
        raise MarlRayError(f"bundle {str(reference)!r} holds language models, expected actor-critics")
    return bundle
