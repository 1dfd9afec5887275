"""Every op, once, by family: a module each. Importing this package fills the registry."""

from npu_compiler.ops.registry import OpDefinition, definition, get_supported_ops
from npu_compiler.plugins import modules_of

__all__ = ["OpDefinition", "definition", "get_supported_ops"]

modules_of(__name__)  # an op is known once its module is imported
