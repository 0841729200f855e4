"""Learning in the process that answers: from one user's requests, in its idle moments, in one folder."""
