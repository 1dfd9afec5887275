"""The Metal target: Apple GPUs, and the software GPU wherever there is none."""
