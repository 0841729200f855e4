"""The fleet's memory in the making: the texts that were learned, by owner, and their files in snapshots."""
