"""`python -m services.controller`."""

from services.controller.main import main

main()
