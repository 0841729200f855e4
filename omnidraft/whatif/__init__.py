"""What other settings would have had accepted: recorded answers drafted for again, without their target."""
