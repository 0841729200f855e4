"""The snapshot that a worker serves, and the updater that takes up new ones."""
