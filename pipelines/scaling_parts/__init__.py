"""How the fleet's figures grow with its workers; ../scaling.py is the program."""
