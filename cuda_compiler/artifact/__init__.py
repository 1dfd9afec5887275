"""What programs for CUDA hold that others do not: all that the device's side knows of this compiler."""
