"""Whole models of several families: the IR computes what the model computes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from npu_cli.sample_models import photograph_crops, resnet
from tests.support.decoders import Logits, import_transformers
from tests.support.extraction import check_computes, nodes_of

SIZES = {"vocab_size": 97, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}


def test_resnet() -> None:
    sample = resnet("resnet18", weights="seeded")
    extraction = check_computes(sample.module, (torch.from_numpy(photograph_crops(1, side=64)),))
    assert len(nodes_of(extraction, "aten.conv2d.default")) == 20
    assert len(nodes_of(extraction, "aten.batch_norm.default")) == 20


@pytest.mark.parametrize("family", ["Qwen2", "Llama"])
def test_decoders(family: str) -> None:
    transformers = import_transformers()
    config = getattr(transformers, f"{family}Config")(num_key_value_heads=2, tie_word_embeddings=True, **SIZES)
    model = Logits(getattr(transformers, f"{family}ForCausalLM")(config))
    extraction = check_computes(model, (torch.arange(8)[None],))
    assert not [node for node in extraction.ir["nodes"] if node["op_type"].startswith(("wrap_", "<"))]
    assert "model.lm_head.weight" not in extraction.weights


def test_encoder() -> None:
    transformers = import_transformers()
    model = transformers.BertModel(transformers.BertConfig(**SIZES)).eval()

    class Encoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.bert = model

        def forward(self, tokens: torch.Tensor, mask: torch.Tensor) -> Any:
            return self.bert(input_ids=tokens, attention_mask=mask)[0]

    tokens = torch.arange(8)[None]
    check_computes(Encoder().eval(), (tokens, torch.ones_like(tokens)))
