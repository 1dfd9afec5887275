"""Text from language models: their folders, their functions and caches, tokens and how they are chosen."""

from npu_text.generator import Generator

__all__ = ["Generator"]
