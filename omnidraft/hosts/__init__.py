"""Our code running as a process of its own or inside somebody else's; builds its objects through assembly."""
