"""The worker's side: noise, proposers, the rule that keeps the target's distribution, the loop around it."""
