"""A hook of mkdocs: anchors of Korean headings are their words, as a repository's host has them, and not numbers."""

from __future__ import annotations

from typing import Any

from pymdownx.slugs import slugify

__all__ = ["on_config"]


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config
