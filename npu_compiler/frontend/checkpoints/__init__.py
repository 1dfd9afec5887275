"""Importers of quantised checkpoints: each brings one format to the form of `form.CodedMatrix`."""
