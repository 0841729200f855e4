"""Registries of snapshot versions: MLflow, or plain folders."""
