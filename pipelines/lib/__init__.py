"""Parts that several pipelines share."""
