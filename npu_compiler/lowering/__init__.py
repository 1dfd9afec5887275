"""From what tracing left behind to launches in memory: groups, order, places, and what all targets share."""
