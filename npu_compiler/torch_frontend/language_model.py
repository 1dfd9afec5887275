"""`extract_language_model`: a decoder of Hugging Face to IR."""

from npu_compiler.frontend.language_model import extract_language_model

__all__ = ["extract_language_model"]
