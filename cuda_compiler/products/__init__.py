"""Matrix products on CUDA: by the copy engine, by tiles, of few rows."""
