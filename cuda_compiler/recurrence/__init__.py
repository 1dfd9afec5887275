"""Recurrent layers: clusters that keep their weights, or a launch for each step."""
