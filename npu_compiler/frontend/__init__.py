"""What comes in: `torch.nn.Module` to IR JSON, which alone imports torch, and the reader of IR JSON."""
