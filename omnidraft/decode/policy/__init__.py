"""How much to draft; each policy is one file behind ports.Policy."""
