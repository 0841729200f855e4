"""The checks of `omnidraft doctor`: one small function each, which returns a finding with advice."""
