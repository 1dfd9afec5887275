"""Attention on Metal."""
