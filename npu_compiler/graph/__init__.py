"""The graph: what it consists of, the matcher of rewrites, the passes, and tracing, which calls each op once."""
