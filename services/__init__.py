"""What gets deployed: one thin main per service."""
