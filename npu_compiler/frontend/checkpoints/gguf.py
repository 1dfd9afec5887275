"""GGUF: one file with a model's sizes, and tensors in blocks by the names of llama.cpp.

The format: a header, values by name, each tensor's name, sizes (the columns first), type and place, then the data. Of
the family of Llama the rows of queries and keys lie in the order in which llama.cpp turns pairs of them.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import replace
from io import BufferedReader
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from npu_compiler.errors import ExtractionError
from npu_compiler.frontend.checkpoints.form import Array, CodedMatrix
from npu_compiler.frontend.checkpoints.gguf_blocks import BLOCKS, PLAIN
from npu_compiler.frontend.checkpoints.importer import MOST_LAYERS, Config, Importer
from npu_compiler.frontend.checkpoints.small_floats import times
from npu_compiler.frontend.checkpoints.tensors import Tensors
from npu_compiler.integers import ceil_div

__all__ = ["Gguf", "GgufFile"]

_MAGIC, _VERSIONS = b"GGUF", (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9
_MOST_ELEMENTS, _MOST_SIZE = 1 << 48, 1 << 31
_MOST_TENSORS, _MOST_VALUES, _MOST_DIMS = 1 << 20, 1 << 20, 4
_FAMILIES = {"llama": "Llama", "qwen2": "Qwen2", "qwen3": "Qwen3"}
_TURNED = ("llama",)  # whose rows of queries and keys are not in the order of Hugging Face
_WHOLE = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_OF_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


class _Entry(NamedTuple):
    """A tensor of the file: its own name, shape (rows first), type, and where its data begins."""

    name: str
    shape: tuple[int, ...]
    kind: int
    start: int


class GgufFile(Tensors):
    """The tensors of a file by the names that Hugging Face gives them.

    Attributes:
        values: What the file says of the model, but for long lists.
    """

    def __init__(self, path: Path) -> None:
        """Reads the header.

        Raises:
            ExtractionError: The file is damaged, or of a family of models that is not read.
        """
        super().__init__()
        self._path = path
        try:
            with path.open("rb") as file:
                self._size = path.stat().st_size
                self.values, entries = self._read_header(file)
        except OSError as error:
            raise ExtractionError(f"cannot read '{path}': {error.strerror}") from error
        except (struct.error, UnicodeDecodeError, OverflowError, MemoryError) as error:
            raise self._damaged("a header that ends early") from error
        self.family = str(self.values.get("general.architecture"))
        if self.family not in _FAMILIES:
            raise ExtractionError(
                f"'{path}': given a model of the family '{self.family}', expected {_either(_FAMILIES)}"
            )
        self._entries = {_renamed(entry.name): entry for entry in entries}
        if len(self._entries) != len(entries):
            raise self._damaged("two tensors have one name")

    def _damaged(self, what: str) -> ExtractionError:
        return ExtractionError(f"'{self._path}' is no whole GGUF file: {what}; download it again")

    def _read_header(self, file: BufferedReader) -> tuple[dict[str, Any], list[_Entry]]:
        magic = file.read(4)
        version, tensors, values = struct.unpack("<IQQ", file.read(20))
        if magic != _MAGIC or version not in _VERSIONS or tensors > _MOST_TENSORS or values > _MOST_VALUES:
            raise self._damaged(f"it begins with {magic!r}, version {version}")
        found = dict(self._read_value(file) for _ in range(values))
        raw = [self._read_entry(file) for _ in range(tensors)]
        alignment = found.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1:
            raise self._damaged(f"an alignment of {alignment!r}")
        begin = ceil_div(file.tell(), alignment) * alignment
        return found, [entry._replace(start=begin + entry.start) for entry in raw]

    def _text(self, file: BufferedReader) -> str:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > self._size:
            raise self._damaged(f"a name of {length} bytes")
        return file.read(length).decode()

    def _read_value(self, file: BufferedReader) -> tuple[str, Any]:
        name = self._text(file)
        (kind,) = struct.unpack("<I", file.read(4))
        return name, self._value(file, kind)

    def _value(self, file: BufferedReader, kind: int) -> Any:
        """A value; of a list a word on it."""
        if kind in _SCALARS:
            form = "<" + _SCALARS[kind]
            return struct.unpack(form, file.read(struct.calcsize(form)))[0]
        if kind == _STRING:
            return self._text(file)
        if kind != _ARRAY:
            raise self._damaged(f"a value of the unknown type {kind}")
        kind, count = struct.unpack("<IQ", file.read(12))
        if count > self._size or kind == _ARRAY:
            raise self._damaged(f"a list of {count} values of type {kind}")
        for _ in range(count):
            self._value(file, kind)
        return f"a list of {count}"

    def _read_entry(self, file: BufferedReader) -> _Entry:
        name = self._text(file)
        (rank,) = struct.unpack("<I", file.read(4))
        if not 1 <= rank <= _MOST_DIMS:
            raise self._damaged(f"'{name}' has {rank} dimensions")
        sizes = struct.unpack(f"<{rank}Q", file.read(8 * rank))
        if prod(n or 1 for n in sizes) > _MOST_ELEMENTS:
            raise self._damaged(f"'{name}' has the sizes {list(sizes)}")
        kind, start = struct.unpack("<IQ", file.read(12))
        return _Entry(name, tuple(reversed(sizes)), kind, start)

    def names(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def own_name(self, name: str) -> str:
        """What the file calls a tensor."""
        return self._entries[name].name

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entries[name].shape

    def kind(self, name: str) -> int:
        return self._entries[name].kind

    def _read(self, name: str) -> Array:
        entry = self._entries[name]
        plain = PLAIN.get(entry.kind)
        if plain is None:
            shown = BLOCKS[entry.kind].name if entry.kind in BLOCKS else f"type {entry.kind}"
            raise ExtractionError(f"'{entry.name}': given {shown}, expected plain numbers, {_either(PLAIN.values())}")
        kind = np.dtype(getattr(ml_dtypes, plain, plain))
        array = self._bytes(entry, prod(entry.shape) * kind.itemsize).view(kind).reshape(entry.shape)
        order = self._row_order(name, entry.shape[0])
        return array if order is None else array[order]

    def blocks(self, name: str, nbytes: int, per_row: int) -> Array:
        """The blocks of a matrix, uint8 [rows, blocks, nbytes], its rows in the order of Hugging Face."""
        entry = self._entries[name]
        raw = self._bytes(entry, entry.shape[0] * per_row * nbytes).reshape(entry.shape[0], per_row, nbytes)
        self.skip(name)
        order = self._row_order(name, entry.shape[0])
        return raw if order is None else raw[order]

    def _bytes(self, entry: _Entry, count: int) -> Array:
        if entry.start + count > self._size:
            raise self._damaged(f"'{entry.name}' ends at byte {entry.start + count} of {self._size}")
        found = np.fromfile(self._path, np.uint8, count, offset=entry.start)
        if found.size != count:
            raise self._damaged(f"'{entry.name}' ends early, as it was changed while it was read")
        return found

    def _row_order(self, name: str, rows: int) -> Array | None:
        """Where each row of the model's lies in the file; None where they lie as they are."""
        if self.family not in _TURNED or not re.search(r"self_attn\.[qk]_proj\.", name):
            return None
        heads = self._heads if ".q_proj." in name else self._key_heads
        if heads < 1 or rows % (2 * heads):
            raise ExtractionError(f"'{self.own_name(name)}': given {rows} rows, expected two of each of {heads} heads")
        return np.arange(rows).reshape(heads, rows // heads // 2, 2).swapaxes(1, 2).reshape(-1)

    def _count(self, key: str, default: int | None = None, most: int = _MOST_SIZE) -> int:
        """A whole number that the file says of its family. Raises as `value` does."""
        found = self.value(key, default)
        if type(found) is not int or not 0 <= found <= most:
            raise ExtractionError(f"'{self._path}': given {found!r} as '{self.family}.{key}', expected 0 to {most}")
        return found

    def value(self, key: str, default: int | float | None = None) -> Any:
        """A number that the file says of its family.

        Raises:
            ExtractionError: It does not, and there is no default.
        """
        name = f"{self.family}.{key}"
        found = self.values.get(name, default)
        if not isinstance(found, int | float):
            raise ExtractionError(f"'{self._path}': given {found!r} as '{name}', expected a number")
        return found

    def _token(self, kind: str) -> int | None:
        """The token that begins or ends a text, if the file names one."""
        found = self.values.get(f"tokenizer.ggml.{kind}_token_id")
        return found if type(found) is int else None

    @property
    def _heads(self) -> int:
        return self._count("attention.head_count")

    @property
    def _key_heads(self) -> int:
        return self._count("attention.head_count_kv", self._heads)

    def configuration(self) -> dict[str, Any]:
        """The model's configuration, as transformers names its entries.

        Raises:
            ExtractionError: The file says too little, or that positions are scaled.
        """
        scaling = self.values.get(f"{self.family}.rope.scaling.type", "none")
        if scaling != "none" or "rope_freqs.weight" in self:
            raise ExtractionError(f"'{self._path}': given scaled positions ({scaling}), expected plain rotary ones")
        embedding = "model.embed_tokens.weight"
        if embedding not in self:
            raise ExtractionError(f"'token_embd.weight' is missing from '{self._path}'; download it again")
        if len(self.shape(embedding)) != 2:
            raise self._damaged(f"'token_embd.weight' has the shape {list(self.shape(embedding))}")
        vocabulary, hidden = self.shape(embedding)
        config = {
            "model_type": self.family,
            "architectures": [f"{_FAMILIES[self.family]}ForCausalLM"],
            "vocab_size": vocabulary,
            "hidden_size": hidden,
            "intermediate_size": self._count("feed_forward_length"),
            "num_hidden_layers": self._count("block_count", most=MOST_LAYERS),
            "num_attention_heads": self._heads,
            "num_key_value_heads": self._key_heads,
            "head_dim": self._count("attention.key_length", hidden // max(1, self._heads)),
            "max_position_embeddings": self._count("context_length"),
            "rms_norm_eps": float(self.value("attention.layer_norm_rms_epsilon")),
            "rope_theta": float(self.value("rope.freq_base", 10000.0)),
            "tie_word_embeddings": "lm_head.weight" not in self,
            "bos_token_id": self._token("bos"),
            "eos_token_id": self._token("eos"),
        }
        if any(name.endswith("self_attn.q_proj.bias") for name in self.names()) and self.family == "llama":
            config["attention_bias"] = True
        return config


class Gguf(Importer):
    """Of a file with the ending ``.gguf``."""

    def __init__(self, config: Config) -> None:
        pass

    def matrix(self, module: str, shape: tuple[int, int], tensors: Tensors) -> CodedMatrix | None:
        name = f"{module}.weight"
        assert isinstance(tensors, GgufFile)
        if name not in tensors or tensors.kind(name) in PLAIN:
            return None
        own, kind = tensors.own_name(name), BLOCKS.get(tensors.kind(name))
        if kind is None:
            known = _either([*PLAIN.values(), *(block.name for block in BLOCKS.values())])
            raise ExtractionError(f"'{own}': given numbers of type {tensors.kind(name)}, expected {known}")
        if tensors.shape(name) != shape or shape[1] % kind.size:
            raise ExtractionError(
                f"'{own}': given the shape {list(tensors.shape(name))}, expected {list(shape)} in blocks of {kind.size}"
            )
        made = kind.matrix(shape, tensors.blocks(name, kind.nbytes, shape[1] // kind.size))
        whole = f"{module}.scale"
        if made.codebook is not None and whole in tensors:
            assert isinstance(made.scales, CodedMatrix)
            tensors.skip(f"{module}.input_scale")
            factor = tensors.take(whole, (1,), ("float32",))
            made = replace(made, scales=times(tensors.own_name(whole), made.scales, factor))
        return replace(made, scales_name=own)


def _either(names: Any) -> str:
    return ", ".join(map(str, names))


def _renamed(name: str) -> str:
    """What Hugging Face calls a tensor; names that it does not know stay."""
    stem, _, end = name.rpartition(".")
    if stem in _WHOLE:
        return f"{_WHOLE[stem]}.{end}"
    found = re.fullmatch(r"blk\.(\d+)\.(\w+)", stem)
    if found is None or found[2] not in _OF_LAYER:
        return name
    return f"model.layers.{found[1]}.{_OF_LAYER[found[2]]}.{end}"
