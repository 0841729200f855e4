"""`python -m services.distiller`."""

from services.distiller.main import main

main()
