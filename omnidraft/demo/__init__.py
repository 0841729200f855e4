"""The whole circle on real models, and the recorded answers that it learns from: `omnidraft demo`."""
