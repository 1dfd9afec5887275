"""Metal for machines that have none: kernels compiled for the CPU, behind the names of pyobjc."""
