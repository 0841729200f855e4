"""The decode worker service: serves requests and records what the target believed."""
