"""Who guesses what the target will draw; each proposer is one file behind ports.Proposer."""
