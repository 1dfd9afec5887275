"""Language models on a cluster of Ray: replicas behind the API, and datasets of texts."""

from npu_compiler.errors import MissingDependencyError

try:
    from npu_text.ray.deployment import openai_app
    from npu_text.ray.text_batches import TextBatches
except ModuleNotFoundError as error:
    raise MissingDependencyError(
        f"npu_text.ray needs the package '{error.name}', which is not installed; install the extra that has it: "
        "pip install 'npu-compiler[ray]'"
    ) from error

__all__ = ["TextBatches", "openai_app"]
