"""Many texts at once: lanes, pages of the cache, and who gets them when."""
