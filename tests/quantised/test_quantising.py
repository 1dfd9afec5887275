"""`npu quantize`: what it writes, it reads, and so does compressed-tensors; the errors that it tells are those made."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from npu_cli.main import main
from npu_compiler.errors import ExtractionError
from npu_runtime import Device
from tests.quantised.test_decoders import TOKENS, check
from tests.support.decoders import import_transformers
from tests.support.quantised import write_checkpoint


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """A model in bfloat16, with an output layer of its own."""
    folder = tmp_path_factory.mktemp("plain")
    options: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": False}
    return folder, write_checkpoint(folder, {}, lambda name, weight: None, torch.bfloat16, **options)


def quantised(source: Path, target: Path, *options: Any) -> list[Any]:
    import_transformers()
    from npu_compiler.frontend.quantising import quantise_checkpoint

    return quantise_checkpoint(source, target, *options)


def read(folder: Path) -> Any:
    from npu_compiler.frontend.decoder_source import load_decoder

    return load_decoder(folder, None, 0)


def logits(model: Any) -> torch.Tensor:
    with torch.no_grad():
        result: torch.Tensor = model(input_ids=torch.tensor([TOKENS]), use_cache=False).logits[0].float()
    return result


@pytest.mark.parametrize(
    ("options", "most", "least"),
    [
        (("int8",), 0.009, 0.9995),
        (("int8", 32), 0.008, 0.9995),
        (("int4", 32), 0.1, 0.98),
        (("fp8",), 0.04, 0.995),
        (("nf4", 64, "16"), 0.11, 0.98),
        (("int4", 32, "16"), 0.1, 0.98),
    ],
    ids=str,
)
def test_what_is_written_is_read(
    options: tuple[Any, ...], most: float, least: float, plain: tuple[Path, Any], tmp_path: Path
) -> None:
    source, model = plain
    layers = quantised(source, tmp_path / "model", *options)
    made = read(tmp_path / "model")
    weights = dict(model.named_parameters())
    assert len(layers) == 7 + (2 if options[-1] != "16" else 0)
    for layer in layers:
        given, matrix = weights[f"{layer.name}.weight"], made.get_submodule(layer.name).matrix()
        error = float(((matrix.float() - given).norm() / given.norm()).detach())
        assert error == pytest.approx(layer.error, abs=0.001)  # and its rounding to bfloat16
        assert error < most
    assert float(torch.corrcoef(torch.stack([logits(made).flatten(), logits(model).flatten()]))[0, 1]) > least


def test_a_tied_head_of_8_bits_on_a_device(tmp_path: Path, device: Device) -> None:
    options: dict[str, Any] = {"num_hidden_layers": 1, "tie_word_embeddings": True}
    write_checkpoint(tmp_path / "plain", {}, lambda name, weight: None, torch.bfloat16, **options)
    quantised(tmp_path / "plain", tmp_path / "quantised", "int8")
    model = import_transformers().AutoModelForCausalLM.from_pretrained(tmp_path / "plain", dtype=torch.float32).eval()
    made = read(tmp_path / "quantised")
    assert made.lm_head.matrix is made.model.embed_tokens.matrix
    with torch.no_grad():
        for name, module in list(made.named_modules()):
            if hasattr(module, "matrix"):
                model.get_submodule(name).weight.copy_(module.matrix().float())
    check(tmp_path / "quantised", model, tmp_path / "model", device)


def test_compressed_tensors_reads_it(plain: tuple[Path, Any], tmp_path: Path) -> None:
    import_transformers()
    library = pytest.importorskip("compressed_tensors")
    from safetensors.torch import load_file

    for options in (("int4", 32), ("int8",), ("int8", 64), ("fp8",)):
        folder = tmp_path / "-".join(map(str, options))
        quantised(plain[0], folder, *options)
        tensors = load_file(folder / "model.safetensors")
        section = json.loads((folder / "config.json").read_text())["quantization_config"]
        group = dict(section["config_groups"]["group_0"])
        library.QuantizationConfig(**section)
        scheme = library.quantization.QuantizationScheme(**group)
        compressor = library.compressors.BaseCompressor.load_from_registry(group["format"])
        place = "model.layers.0.mlp.down_proj"
        own = {name.removeprefix(f"{place}."): part for name, part in tensors.items() if name.startswith(f"{place}.")}
        theirs = compressor.decompress(own, scheme)["weight"]
        assert torch.equal(theirs.to(torch.bfloat16), read(folder).get_submodule(place).matrix())


def test_the_command_tells_sizes_and_errors(
    plain: tuple[Path, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    line = ["quantize", str(plain[0]), "-o", str(tmp_path / "model"), "--weights", "int4", "--group", "32"]
    assert main(line) == 0
    lines = capsys.readouterr().out.splitlines()
    errors = [float(line.rsplit(None, 1)[1].rstrip("%")) for line in lines[1:9]]
    assert errors == sorted(errors, reverse=True)
    assert "9 weights" in lines[-1]
    assert main([*line[:3], str(tmp_path / "again"), "--weights", "fp8", "--group", "64"]) == 1
    assert "given groups of 64 for fp8" in capsys.readouterr().err
    assert not (tmp_path / "again").exists()


def test_what_cannot_be_quantised_is_refused(plain: tuple[Path, Any], tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    quantised(plain[0], tmp_path / "model", "int8")
    with pytest.raises(ExtractionError, match="which is quantised already"):
        quantised(tmp_path / "model", tmp_path / "again", "int8")
    with pytest.raises(ExtractionError, match=r"proj\.weight': given groups of 48, expected a divisor of its"):
        quantised(plain[0], tmp_path / "again", "int4", 48)
    with pytest.raises(ExtractionError, match="the weights are read from it"):
        quantised(plain[0], plain[0], "int4", 32)
    tensors = load_file(plain[0] / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 4] = np.nan
    (tmp_path / "nan").mkdir()
    save_file(tensors, tmp_path / "nan" / "model.safetensors")
    (tmp_path / "nan" / "config.json").write_bytes((plain[0] / "config.json").read_bytes())
    with pytest.raises(ExtractionError, match=r"'model\.layers\.0\.mlp\.up_proj\.weight': given numbers that are inf"):
        quantised(tmp_path / "nan", tmp_path / "again", "int4", 32)
    assert not (tmp_path / "again").exists()
