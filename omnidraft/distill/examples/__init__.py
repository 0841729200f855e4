"""From trace records to training examples and the targets of each loss."""
