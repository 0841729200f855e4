"""The learner: losses, gradients, the optimizer, the acceptance head, replay."""
