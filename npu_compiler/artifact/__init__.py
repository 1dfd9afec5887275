"""What the compiler hands to the runtime: plans, weight recipes, their file, its checks and its description."""
