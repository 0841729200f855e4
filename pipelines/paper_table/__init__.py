"""The tables of the OmniDraft paper for one's own targets: `python -m pipelines.paper_table`."""
