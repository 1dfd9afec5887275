"""How a model is divided between device and CPU; `npu_compiler.partitioner` is the way in."""
