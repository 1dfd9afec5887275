"""Language models as pytorch-ir itself extracts them, on the meta device, run as PyTorch runs them."""

from __future__ import annotations

import pytest
import torch
from torch_ir import extract_ir

from npu_compiler import partition
from npu_runtime import DAGExecutor, Device
from npu_runtime.host_tensors import to_numpy
from tests.partition.mixed import array, check_equal
from tests.support.decoders import Logits, config, import_transformers


@pytest.mark.filterwarnings("ignore:Skipping .* meta-device constant")
@pytest.mark.parametrize("family", ["Llama", "GPT2"])
def test_a_decoder_whose_mask_takes_differences(family: str, device: Device) -> None:
    """Its `diff` has a tensor in front and none behind, of which the IR says only that there is one."""
    transformers = import_transformers()
    kind = transformers.AutoModelForCausalLM.from_config
    settings = config(family)
    with torch.device("meta"):
        ir = extract_ir(Logits(kind(settings)), (torch.zeros((1, 8), dtype=torch.int64),))
    model = Logits(kind(settings))
    plan = partition(ir)
    (note,) = plan.notes
    assert note.startswith("node 'diff' (aten.diff.default): append taken for absent and prepend for given, by their ")
    executor = DAGExecutor(plan, device)
    tensors = (*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False))
    executor.load_weights({name: to_numpy(tensor.detach()) for name, tensor in tensors})
    tokens = torch.arange(3, 11)[None]
    (result,) = executor.execute({plan.inputs[0].name: tokens.numpy()}).values()
    with torch.no_grad():
        check_equal("logits", array(result), model(tokens), 5e-3)
