"""Matrix products on Metal: by tiles, of one row."""
