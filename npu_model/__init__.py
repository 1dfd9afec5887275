"""A model, compiled and run in one step: what needs the compiler and the runtime both."""

from npu_model.dag_executor import DAGExecutor
from npu_model.model import Model, load

__all__ = ["DAGExecutor", "Model", "load"]
