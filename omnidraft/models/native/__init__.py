"""The drafter's forward pass in C++, compiled on the machine that runs it."""
