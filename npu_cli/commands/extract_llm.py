"""`npu extract-llm`: a language model of Hugging Face to a folder that `npu generate` takes."""

from __future__ import annotations

import argparse
from contextlib import suppress

from npu_cli.extras import import_extra, import_torchvision
from npu_cli.progress import waiting
from npu_cli.timing import timed
from npu_compiler.artifact.describe import format_bytes
from npu_compiler.errors import MissingDependencyError
from npu_compiler.frontend.decoder_request import BatchRequest, RoundingRequest, check_request, has_weights

__all__ = ["execute"]


def execute(args: argparse.Namespace) -> int:
    wanted = (args.lanes, args.page_tokens, args.pages, args.chunks, args.guess)
    batch = None if args.lanes is None else BatchRequest(*wanted)
    # before large imports
    check_request(args.model, args.output, args.cache, args.prefill, args.seed, batch)
    for module in ("torch", "torch_ir", "transformers"):
        import_extra(module, "llm")
    with suppress(MissingDependencyError):  # transformers imports it where it is there, and needs not have it
        import_torchvision()
    from npu_compiler.frontend.language_model import extract_language_model

    options = {"cache_length": args.cache, "prefill": args.prefill, "dtype": args.dtype, "seed": args.seed}
    options |= {"batch": batch, "rounding": RoundingRequest(args.activations, args.kv_cache_dtype)}
    with waiting("extracting the model"):
        spec, seconds = timed(lambda: extract_language_model(args.model, args.output, **options))
    weights = f"{format_bytes((args.output / spec.weights).stat().st_size)} of weights"
    if not has_weights(args.model):
        weights += f" drawn at random by seed {args.seed}"
    functions = ", ".join((*spec.functions, *(() if spec.batch is None else spec.batch.functions)))
    print(
        f"{args.output}: {spec.model} in {spec.dtype}, {weights}, {functions}, a cache of "
        f"{spec.cache_length} tokens, extracted in {seconds:.1f} s"
    )
    return 0
