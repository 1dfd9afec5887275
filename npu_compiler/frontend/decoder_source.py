"""Where a language model comes from: a folder of Hugging Face with weights, or a configuration alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.initialization import no_init_weights

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.cached_decoder import attention_of
from npu_compiler.frontend.checkpoints.formats import importer_of
from npu_compiler.frontend.checkpoints.gguf import Gguf, GgufFile
from npu_compiler.frontend.checkpoints.importer import Importer, describing
from npu_compiler.frontend.checkpoints.tensors import SafetensorsFolder, Tensors
from npu_compiler.frontend.coded_decoder import ACTIVATIONS, coded_decoder
from npu_compiler.frontend.decoder_request import GGUF, configuration, has_weights

__all__ = ["load_decoder"]

_HALF = ("bfloat16", "float16")
# Of seeded weights, found by trial on 2 to 28 layers: texts that do not soon repeat themselves, while bfloat16 still
# follows float32 closely.
_GAIN = 1.2  # deviation of what a matrix makes of numbers of deviation 1
_ROW_SPREAD = 0.15  # deviation of the logarithm of the lengths of output rows


def load_decoder(source: Path, dtype: str | None, seed: int, activations: str | None = None) -> Any:
    """A causal language model in eval mode, in half precision; its buffers stay in the precision the model gives them.

    Args:
        source: A folder with ``config.json`` and weights; such a folder without weights, or a configuration file, for
            seeded ones.
        dtype: ``bfloat16`` or ``float16``; the checkpoint's own where that is one of them, else bfloat16, when None.
        seed: Of weights that no file gives.
        activations: See `coded_decoder`.

    Raises:
        ExtractionError: Nothing of the kind is there, or transformers cannot load it as a causal language model; or its
            weights are not of the type that activations are to be rounded to.
    """
    if dtype not in (None, *_HALF):
        raise ExtractionError(f"given dtype='{dtype}', expected one of {', '.join(_HALF)}")
    if activations not in (None, *ACTIVATIONS):
        raise ExtractionError(f"given activations='{activations}', expected one of {', '.join(ACTIVATIONS)}")
    quantised = _quantised(source, dtype, activations)
    if quantised is not None:
        return quantised
    if activations not in (None, "16"):
        raise ExtractionError(
            f"given activations='{activations}' for '{source}', whose weights are not quantised; run npu quantize first"
        )
    with _loading(source):
        config = AutoConfig.from_pretrained(source, local_files_only=True)
        own = str(config.dtype).removeprefix("torch.")
        kind = getattr(torch, dtype or (own if own in _HALF else "bfloat16"))
        if has_weights(source):
            options = {"dtype": kind, "attn_implementation": attention_of(config), "local_files_only": True}
            return AutoModelForCausalLM.from_pretrained(source, config=config, **options).eval()
        with no_init_weights():
            model = AutoModelForCausalLM.from_config(config, dtype=kind, attn_implementation=attention_of(config))
        model.eval()
    model.tie_weights()
    _seed_weights(model, seed)
    return model


def _quantised(source: Path, dtype: str | None, activations: str | None) -> Any:
    """The model of a quantised checkpoint; None where there is none, or where its weights are to be seeded."""
    tensors: Tensors
    importer: Importer | None
    with describing(f"'{source}'"):
        if source.suffix == GGUF:
            tensors, importer = GgufFile(source), Gguf({})
            content = tensors.configuration()
            config = AutoConfig.for_model(content.pop("model_type"), **content)
        else:
            content = configuration(source)
            importer = importer_of(content) if has_weights(source) else None
            if importer is None:
                return None
            tensors = SafetensorsFolder(source)
            with _loading(source):
                config = AutoConfig.from_pretrained(source, local_files_only=True)
    for name in ("quantization_config", "quantization"):
        if hasattr(config, name):
            delattr(config, name)
    own = str(config.dtype).removeprefix("torch.")
    kind = dtype or (own if own in _HALF else importer.default_dtype)
    return coded_decoder(config, importer, tensors, getattr(torch, kind), activations)


@contextmanager
def _loading(source: Path) -> Iterator[None]:
    """Lets transformers load something: whatever a configuration makes it raise is an ExtractionError."""
    try:
        yield
    except Exception as error:
        reason = str(error).strip().partition("\n")[0]
        raise ExtractionError(
            f"given '{source}', expected a Hugging Face folder or config.json of a causal language model: {reason}"
        ) from error


def _seed_weights(model: Any, seed: int) -> None:
    """Gives each parameter values that depend on `seed` alone, such that activations keep their size.

    Matrices nearly keep the variance of what they multiply, so that no softmax is flat and no layer fades away. The
    rows of the output layer differ in length, so that the best logits lie apart.
    """
    generator = torch.Generator().manual_seed(seed)
    rows = model.get_output_embeddings().weight
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, _GAIN * parameter.shape[-1] ** -0.5, generator=generator)
            elif name.endswith("bias"):
                parameter.normal_(0, 0.1, generator=generator)
            else:
                parameter.uniform_(0.5, 1.5, generator=generator)
        rows.mul_(torch.randn(rows.shape[0], 1, generator=generator).mul(_ROW_SPREAD).exp().to(rows.dtype))
