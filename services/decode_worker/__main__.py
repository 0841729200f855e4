"""`python -m services.decode_worker`."""

from services.decode_worker.main import main

main()
