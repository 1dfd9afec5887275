"""What tiles cost: `measure` times candidates on a GPU, `fit` brings the constants in the data of devices to that."""
