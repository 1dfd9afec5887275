"""A hook of mkdocs: headings in Korean get anchors of their words, as a repository's host makes them, and not numbers."""

from __future__ import annotations

from typing import Any

from pymdownx.slugs import slugify

__all__ = ["on_config"]


def on_config(config: Any) -> Any:
    config.mdx_configs["toc"]["slugify"] = slugify(case="lower")
    return config
