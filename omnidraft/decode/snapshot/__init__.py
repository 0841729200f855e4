"""The snapshot that a worker serves, and the updater that loads new ones."""
