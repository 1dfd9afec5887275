"""Extraction, by the names that users type; it lives in `npu_compiler.frontend`."""
