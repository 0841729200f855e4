"""Pure scoring that worker, learner and fleet share."""
