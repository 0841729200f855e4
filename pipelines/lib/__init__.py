"""What several pipelines share."""
