"""Experts in MXFP4 as gpt-oss has them: against transformers, from the folder to logits, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from npu_compiler.errors import ExtractionError
from npu_runtime import Device
from tests.quantised.test_decoders import check
from tests.support.decoders import config, import_transformers

EXPERTS = 4
SIZES = {"num_local_experts": EXPERTS, "num_experts_per_tok": 2, "head_dim": 16, "num_hidden_layers": 1}
SECTION = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn", "lm_head"]}


def write(folder: Path, **changes: torch.Tensor | None) -> Any:
    """Writes a checkpoint; gives the model with the numbers that it means, as transformers makes them."""
    from safetensors.torch import save_file

    transformers = import_transformers()
    made = config("GptOss", **SIZES)
    made.tie_word_embeddings = False
    torch.manual_seed(3)
    model = transformers.AutoModelForCausalLM.from_config(made).eval().to(torch.bfloat16)
    random, tensors = torch.Generator().manual_seed(5), {}
    for name, parameter in model.named_parameters():
        parameter.data.normal_(0.8 if "norm" in name else 0.0, 1.2 * parameter.shape[-1] ** -0.5, generator=random)
        if parameter.ndim < 3:
            tensors[name] = parameter.data
            continue
        count, inputs, outputs = parameter.shape
        blocks = torch.randint(0, 256, (count, outputs, inputs // 32, 16), generator=random).to(torch.uint8)
        scales = torch.randint(121, 125, blocks.shape[:3], generator=random).to(torch.uint8)
        convert = transformers.integrations.mxfp4.convert_moe_packed_tensors
        parameter.data.copy_(convert(blocks, scales, dtype=torch.bfloat16))
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
    for end, tensor in changes.items():
        name = f"model.layers.0.mlp.experts.{end}"
        tensors.pop(name, None)
        tensors |= {} if tensor is None else {name: tensor}
    folder.mkdir()
    save_file(tensors, folder / "model.safetensors")
    content = made.to_dict() | {"dtype": "bfloat16", "quantization_config": SECTION}
    (folder / "config.json").write_text(json.dumps(content))
    return model.float()


def test_a_checkpoint_becomes_a_model(tmp_path: Path, device: Device) -> None:
    """A prompt meets all experts, a step of one token some of them."""
    model = write(tmp_path / "source")
    check(tmp_path / "source", model, tmp_path / "model", device)


SCALES = torch.full((EXPERTS, 64, 4), 120, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"down_proj_scales": None}, r"experts\.down_proj_scales' is missing from the checkpoint"),
        (
            {"down_proj_scales": SCALES[:, :, :3].contiguous()},
            r"experts\.down_proj_scales': given the shape \[4, 64, 3\]",
        ),
        ({"down_proj_scales": SCALES.float()}, r"down_proj_scales': given float32, expected uint8 or float8_e8m0fnu"),
        (
            {"down_proj_scales": SCALES.index_fill(2, torch.tensor([1]), 255)},
            r"down_proj_scales': given the scale NaN \(code 255 of float8_e8m0fnu\) at \[0, 1\]",
        ),
        ({"down_proj": torch.zeros(EXPERTS, 128, 64)}, r"experts\.down_proj' as numbers and in codes, expected the"),
    ],
)
def test_what_is_wrong_is_named(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    from npu_compiler.frontend.language_model import extract_language_model

    write(tmp_path / "source", **changes)
    with pytest.raises(ExtractionError, match=message):
        extract_language_model(tmp_path / "source", tmp_path / "model", cache_length=64)
    assert not (tmp_path / "model").exists()
