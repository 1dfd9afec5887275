"""`npu quantize --method search`: scales move where nothing changes, and layers give better outputs for it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_cli.main import main
from npu_compiler.errors import ExtractionError
from tests.support.decoders import config, import_transformers

GROUP = 32
TEXT = [np.random.default_rng(row).integers(0, 320, 96).tolist() for row in range(2)]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model some of whose channels are larger than others, as those of trained models are."""
    import_transformers()
    from npu_compiler.frontend.decoder_source import load_decoder

    folder = tmp_path_factory.mktemp("plain")
    config("Qwen2", num_hidden_layers=1).save_pretrained(folder / "configuration")
    model = load_decoder(folder / "configuration", "bfloat16", 0)
    random = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("layernorm.weight"):
                large = torch.rand(parameter.shape, generator=random) < 0.05
                parameter.mul_(torch.where(large, 6.0, 0.8).to(parameter.dtype))
    model.save_pretrained(folder / "model")
    return folder / "model"


def loaded(folder: Path) -> Any:
    from npu_compiler.frontend.decoder_source import load_decoder

    return load_decoder(folder, None, 0)


def test_scales_change_nothing_before_weights_are_rounded(plain: Path) -> None:
    from npu_compiler.frontend.calibration import calibrate, logits_of

    model = loaded(plain).float()
    before = torch.cat([*logits_of(model, TEXT)])
    layers = [name for name, module in model.named_modules() if isinstance(module, torch.nn.Linear) if "layers" in name]
    found = calibrate(model, TEXT, dict.fromkeys(layers, lambda weight, importance: np.round(weight * 16) / 16))
    after = torch.cat([*logits_of(model, TEXT)])
    torch.testing.assert_close(after, before, rtol=0, atol=1e-4 * float(before.abs().max()))
    changed = {name.removeprefix("model.layers.0.").removesuffix(".weight") for name in found.changed}
    assert {"input_layernorm", "self_attn.q_proj", "post_attention_layernorm", "mlp.gate_proj"} <= changed
    assert {"mlp.up_proj", "mlp.down_proj", "self_attn.v_proj", "self_attn.o_proj"} <= changed  # heads share values
    for name in ("input_layernorm", "post_attention_layernorm"):
        weight = torch.from_numpy(found.changed[f"model.layers.0.{name}.weight"])
        torch.testing.assert_close(weight.bfloat16().float(), weight, rtol=1e-6, atol=0)


def test_outputs_and_logits_come_nearer(plain: Path, tmp_path: Path) -> None:
    from npu_compiler.frontend.quantising import change_of_logits, quantise_checkpoint

    outputs, changes = [], []
    for method in ("rtn", "search"):
        layers = quantise_checkpoint(plain, tmp_path / method, "int4", GROUP, "16", method=method, text=TEXT)
        outputs.append(float(np.mean([layer.outputs for layer in layers if layer.outputs is not None])))
        changes.append(change_of_logits(plain, tmp_path / method, TEXT))
    assert outputs[1] < 0.9 * outputs[0]
    assert changes[1].correlation > changes[0].correlation
    assert changes[1].tokens == 192
    assert changes[0].before == changes[1].before
    made = loaded(tmp_path / "search").get_submodule("model.layers.0.mlp.down_proj").matrix()
    assert made.shape == (64, 128)


def test_the_command_tells_what_became_of_logits(
    plain: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["quantize", str(plain), "-o", str(tmp_path / "model"), "--weights", "int4", "--group", "32"]
    assert main([*line, "--method", "search"]) == 1
    assert "given --method search without a text, expected --calibrate FILE or --ids" in capsys.readouterr().err
    (tmp_path / "text").write_text("Some text.")
    assert main([*line, "--calibrate", str(tmp_path / "text")]) == 1
    assert "tokenizer" in capsys.readouterr().err
    assert main([*line, "--calibrate", str(tmp_path / "nothing")]) == 1
    assert "as a text" in capsys.readouterr().err
    assert main([*line, "--ids", "1,2,900"]) == 1
    assert "given the token 900, expected ids from 0 to 319" in capsys.readouterr().err
    assert not (tmp_path / "model").exists()
    assert main([*line, "--ids", ",".join(map(str, TEXT[0]))]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "outputs"
    errors = [float(line.rsplit(None, 1)[1].rstrip("%")) for line in lines[1:8]]
    assert errors == sorted(errors, reverse=True)
    assert lines[-3].startswith("logits of 96 tokens: r from 0.")
    assert lines[-2].startswith("cross-entropy of the text: ")


def test_a_search_needs_a_text(plain: Path, tmp_path: Path) -> None:
    from npu_compiler.frontend.quantising import quantise_checkpoint

    with pytest.raises(ExtractionError, match="given method='search' and 0 rows of a text"):
        quantise_checkpoint(plain, tmp_path / "model", "int4", GROUP, method="search")
