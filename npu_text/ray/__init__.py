"""Language models on a cluster of Ray: replicas behind the API, and datasets of texts. It needs the extra ``ray``."""

from npu_text.ray.deployment import openai_app
from npu_text.ray.text_batches import TextBatches

__all__ = ["TextBatches", "openai_app"]
