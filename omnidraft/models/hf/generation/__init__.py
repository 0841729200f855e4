"""What transformers' `generate` passes to a decoding function of its caller, and what it gets back."""
