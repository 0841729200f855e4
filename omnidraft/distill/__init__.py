"""The learner side: records to positions, losses, steps, and the loop that publishes snapshots."""
