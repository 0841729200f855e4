"""Where snapshots are versioned: MLflow, or plain folders."""
