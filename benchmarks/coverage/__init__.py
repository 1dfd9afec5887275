"""Takes many models, built by name with seeded weights, through all stages, and records how far each one comes."""
