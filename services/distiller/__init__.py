"""The distiller service: learns from the trace log and publishes snapshots."""
